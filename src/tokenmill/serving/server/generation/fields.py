"""Define the kinds of numbers and labels in bodies, and the sampling fields that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_TOOLS = 128

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Label = Annotated[str, Meta(max_length=256)]
# Lists are counted while they are decoded: nothing is done with one that is too long.
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
StopStrings = Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)]
BadWords = Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)]
LogitBias = Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS_ENTRIES)]

# What clients cannot give, or do not give under this name in every API.
_NOT_GIVEN = {"logprobs", "structured_outputs", "grammar", "bad_word_ids", "first_bad_ids", "time_rules"}
_PARAMS = frozenset(SamplingParams.__struct_fields__) - _NOT_GIVEN


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all APIs call by the same names; None stands for a field that was not given."""

    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None


def given_params(body: msgspec.Struct) -> dict[str, Any]:
    """Return the sampling parameters that a body gives under their own names."""
    names = [name for name in body.__struct_fields__ if name in _PARAMS]
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request: the `given` ones, in JSON's types, over the model's `defaults`.

    Raises:
        InvalidRequest: a value outside its range; `param` names the field.
    """
    fields = dict(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = _logit_bias(fields["logit_bias"])
    return SamplingParams(**dict(defaults) | fields)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Return the biases by token id; JSON's keys are strings, and values are clamped to +-100."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:20]!r} is not a token id", "logit_bias")
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}
