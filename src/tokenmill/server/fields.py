"""The request fields that /v1/chat/completions and /v1/completions share, and what becomes of them.

A field is supported, accepted because it changes nothing here (`user`, `metadata` ...), or refused by name unless it
holds the value that asks for nothing special. Unknown fields are refused by name too: none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.errors import InvalidRequest
from tokenmill.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from tokenmill.server.output_fields import ResponseFormat, StructuredOutputsField, structured_outputs

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Label = Annotated[str, Meta(max_length=256)]

_SAME_NAME = (
    "min_tokens",
    "seed",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
    "prompt_logprobs",
)

# Known fields that are not supported, each with the values that ask for nothing special.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "prediction": (),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


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


class GenerationFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of both routes."""

    model: str | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    seed: Int64 | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: Label | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None

    # Accepted without effect: they concern OpenAI's own bookkeeping.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Refused by name, see UNSUPPORTED.
    audio: Any = None
    best_of: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    modalities: Any = None
    prediction: Any = None
    store: Any = None
    suffix: Any = None
    verbosity: Any = None
    web_search_options: Any = None


def refuse_unsupported(body: GenerationFields) -> None:
    """Refuse what would otherwise be silently ignored.

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


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The sampling parameters of a request: its own fields over the model's `defaults`.

    Args:
        max_tokens: the route's own reading of its max_tokens fields; None leaves the model's default, if any.
        logprobs: likewise of its logprobs fields.

    Raises:
        InvalidRequest: a value outside its range; `param` names the field.
    """
    fields = dict(defaults) | shared_params(body)
    fields.update((name, value) for name in _SAME_NAME if (value := getattr(body, name)) is not None)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if logprobs is not None:
        fields["logprobs"] = logprobs
    fields["structured_outputs"] = structured_outputs(body.response_format, body.structured_outputs)
    if body.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.bad_words is not None:
        fields["bad_words"] = tuple(body.bad_words)
    return SamplingParams(**fields)


def shared_params(body: SamplingFields) -> dict[str, Any]:
    """What was given of the fields that all APIs share, as `SamplingParams` takes it.

    Raises:
        InvalidRequest: `logit_bias` is not one.
    """
    fields = {field: value for field in SamplingFields.__struct_fields__ if (value := getattr(body, field)) is not None}
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        fields["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        fields["logit_bias"] = logit_bias_of(body.logit_bias)
    return fields


def wants_prompt(body: GenerationFields) -> bool:
    """Whether the reply tells of the prompt's tokens."""
    return bool(body.return_token_ids) or body.prompt_logprobs is not None


def checked_truncation(count: int | None) -> int | None:
    """`truncate_prompt_tokens`.

    Raises:
        InvalidRequest: it leaves nothing of the prompt.
    """
    if count == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more", "truncate_prompt_tokens")
    return count


def check_logprobs(num_logprobs: int, field: str, max_logprobs: int) -> None:
    """Refuse more alternatives than the server allows.

    Raises:
        InvalidRequest: naming `field`.
    """
    if not 0 <= num_logprobs <= max_logprobs:
        raise InvalidRequest(f"{field} must be between 0 and {max_logprobs}, got {num_logprobs}", field)


def logit_bias_of(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; values are clamped to +-100.

    Raises:
        InvalidRequest: too many entries, or a key that is no token id.
    """
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS_ENTRIES}", "logit_bias")
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:20]!r} is not a token id", "logit_bias")
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}
