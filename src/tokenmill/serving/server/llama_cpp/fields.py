"""Define the fields that llama.cpp's completions share, and the call that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.server.generation.call import GenerationCall, Prompt
from tokenmill.serving.server.generation.fields import (
    Int32,
    Int64,
    Label,
    LogitBias,
    SamplingFields,
    TokenId,
    given_params,
)
from tokenmill.serving.server.http.request_id import RequestId

MAX_RESPONSE_FIELDS = 64
# A seed that means: draw one; as it is, and as an unsigned number of 32 bits.
_NO_SEED = (-1, 2**32 - 1)
# llama.cpp's `false` for a token: never.
_NEVER = -100.0

BiasPairs = Annotated[list[tuple[TokenId, float | bool]], Meta(max_length=MAX_LOGIT_BIAS_ENTRIES)]


class CompletionFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of /completion and /infill, by our names where llama.cpp has others.

    Attributes:
        max_tokens: llama.cpp's `n_predict`; 0: the prompt is only computed, so that it is in the cache when needed.
        n_probs: the likeliest tokens of each position that the reply shows with their log probabilities.
        logit_bias: an object, or pairs of a token and its bias, `false` for never.
        grammar, json_schema: what the text must be: GBNF, or a schema.
        response_fields: paths of the fields that the reply is cut down to: "timings/prompt_n".
    """

    model: str | None = None
    max_tokens: Int32 | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    n_probs: Int32 | None = None
    logit_bias: LogitBias | BiasPairs | None = None  # type: ignore[assignment]
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_RESPONSE_FIELDS)] | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class Shown(msgspec.Struct, frozen=True):
    """Parts of a reply besides its text: tokens, how likely they were; and the fields that it is cut down to."""

    tokens: bool = False
    probabilities: bool = False
    paths: Sequence[str] | None = None


def shown(body: CompletionFields) -> Shown:
    """Return what the reply to a body shows."""
    return Shown(bool(body.return_tokens), bool(body.n_probs), body.response_fields)


def completion_call(body: CompletionFields, prompts: Sequence[Prompt]) -> GenerationCall:
    """Return the call that a body asks for.

    Raises:
        InvalidRequest: it asks for a negative number of tokens, or for a grammar and a schema.
    """
    params = given_params(body)
    if params.get("seed") in _NO_SEED:
        del params["seed"]
    if isinstance(body.logit_bias, list):
        params["logit_bias"] = {str(token): _bias(value) for token, value in body.logit_bias}
    if body.max_tokens is not None and body.max_tokens < 0:
        raise InvalidRequest("max_tokens (n_predict) must be 0 or more, or -1 for as many as fit", "max_tokens")
    if body.max_tokens == 0:
        params["max_tokens"] = 1  # whose logits are those of the prompt's end; it is not shown
    if body.n_probs:
        params["logprobs"] = body.n_probs
    if body.grammar and body.json_schema is not None:
        raise InvalidRequest("give either grammar or json_schema", "grammar")
    if body.grammar:
        params["structured_outputs"] = StructuredOutputs(grammar=body.grammar, param="grammar")
    elif body.json_schema is not None:
        params["structured_outputs"] = StructuredOutputs(json=body.json_schema, param="json_schema")
    return GenerationCall(
        params=params,
        prompts=prompts,
        logprobs_field="n_probs",
        is_score=body.max_tokens == 0,
        priority=body.priority,
        cache_salt=body.cache_salt,
        stream=body.stream,
        timeout=body.timeout,
        model=body.model,
    )


def _bias(value: float | bool) -> float:
    if value is True:
        raise InvalidRequest("logit_bias: a bias is a number, or false for a token that may never come", "logit_bias")
    return _NEVER if value is False else value
