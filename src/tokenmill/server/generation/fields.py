"""Kinds of numbers and labels that bodies have, and the sampling fields that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Label = Annotated[str, Meta(max_length=256)]

# What clients cannot give, or do not give under this name in every API.
_NOT_GIVEN = {"logprobs", "structured_outputs", "grammar", "bad_word_ids"}
_PARAMS = frozenset(SamplingParams.__struct_fields__) - _NOT_GIVEN


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that all APIs call by the same names. `None` stands for a field that was not given."""

    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None


def given_params(body: msgspec.Struct) -> dict[str, Any]:
    """What a body gives of the sampling parameters under their own names."""
    names = [name for name in body.__struct_fields__ if name in _PARAMS]
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a request: those that were `given`, in JSON's types, over the model's `defaults`.

    Raises:
        InvalidRequest: a value outside its range; `param` names the field.
    """
    fields = dict(given)
    if "logit_bias" in fields:
        fields["logit_bias"] = _logit_bias(fields["logit_bias"])
    return SamplingParams(**dict(defaults) | fields)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; values are clamped to +-100."""
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS_ENTRIES}", "logit_bias")
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:20]!r} is not a token id", "logit_bias")
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}
