"""Define and read the fields that /v1/chat/completions and /v1/completions share.

A field is supported, accepted because it changes nothing here (`user`, `metadata` ...), or refused by name unless its
value asks for nothing special. Unknown fields are left out, and the reply names them (`http.unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import (
    AllowedTokenIds,
    BadWords,
    Int32,
    Int64,
    Label,
    SamplingFields,
    given_params,
)
from tokenmill.serving.server.http.request_id import RequestId
from tokenmill.serving.server.openai.response_format import ResponseFormat, StructuredOutputsField, structured_outputs

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# Compared by identity: `typing` keeps one of two annotations that are equal, and 1 equals True.
class Refused(msgspec.Struct, frozen=True, eq=False):
    """Marks a known field that is not supported; `neutral` lists the values that ask for nothing special."""

    neutral: tuple[Any, ...] = ()


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of both routes."""

    model: str | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    seed: Int64 | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    # Calls of one key go to one engine.
    prompt_cache_key: str | None = None

    # Accepted without effect: they concern OpenAI's own bookkeeping, or what models are trained to heed.
    user: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    # Refused by name.
    audio: Annotated[Any, Refused()] = None
    best_of: Annotated[Any, Refused((1,))] = None
    chat_template: Annotated[Any, Refused()] = None
    detokenize: Annotated[Any, Refused((True,))] = None
    documents: Annotated[Any, Refused(([],))] = None
    length_penalty: Annotated[Any, Refused((1, 1.0))] = None
    mm_processor_kwargs: Annotated[Any, Refused(({},))] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    no_stop_trim: Annotated[Any, Refused((False,))] = None
    prediction: Annotated[Any, Refused()] = None
    return_hidden_states: Annotated[Any, Refused((False,))] = None
    return_tokens_as_token_ids: Annotated[Any, Refused((False,))] = None
    separate_reasoning: Annotated[Any, Refused((True,))] = None
    stream_reasoning: Annotated[Any, Refused((True,))] = None
    use_beam_search: Annotated[Any, Refused((False,))] = None
    vllm_xargs: Annotated[Any, Refused(({},))] = None
    web_search_options: Annotated[Any, Refused()] = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    name: mark.neutral
    for name, hint in get_type_hints(GenerationFields, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, Refused)
}


def refuse_unsupported(body: GenerationFields) -> None:
    """Refuse fields that would otherwise be silently ignored.

    Raises:
        InvalidRequest: naming the field.
    """
    for name, neutral in UNSUPPORTED.items():
        value = getattr(body, name)
        if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
            raise InvalidRequest(f"{name} is not supported by this server", name)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs come with the whole reply: they need stream to be false", "prompt_logprobs"
        )


def call_of(body: GenerationFields) -> GenerationCall:
    """Return the call, as far as both routes read it alike.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    refuse_unsupported(body)
    options = body.stream_options or StreamOptions()
    return GenerationCall(
        params=given(body),
        priority=body.priority,
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
        wants_prompt=bool(body.return_token_ids) or body.prompt_logprobs is not None,
        stream=body.stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        timeout=body.timeout,
        wants_progress=bool(body.return_progress),
        wants_timings=bool(body.return_progress or body.timings_per_token),
        kv_transfer_params=body.kv_transfer_params or None,
        model=body.model,
        conversation=body.prompt_cache_key or body.user,
        session_key=body.prompt_cache_key or "",
    )


def given(body: GenerationFields) -> dict[str, Any]:
    """Return the sampling parameters that a body gives, without `logprobs`, which each route reads differently.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    outputs = structured_outputs(body.response_format, body.structured_outputs)
    return given_params(body) | ({} if outputs is None else {"structured_outputs": outputs})
