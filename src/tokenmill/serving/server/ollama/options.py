"""Ollama's `options`, `format`, `think` and `keep_alive`, as parameters of a call."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import template_kwargs
from tokenmill.serving.server.generation.fields import Int32, Int64, StopStrings, given_params
from tokenmill.serving.server.http.body import explained

# A Go duration, such as 1h30m or -1s.
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?0")
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


class Options(msgspec.Struct, kw_only=True):
    """The options that mean something here. Where one is absent, the checkpoint's own default holds, not Ollama's."""

    num_predict: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | StopStrings | None = None


def params_of(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the sampling parameters that options ask for.

    Raises:
        InvalidRequest: an option has a value of the wrong type.
    """
    with explained("options"):
        given = msgspec.convert(options or {}, Options)
    params = given_params(given)
    if given.repeat_penalty is not None:
        params["repetition_penalty"] = given.repeat_penalty
    if given.num_predict is not None and given.num_predict not in (-1, -2):
        params["max_tokens"] = given.num_predict
    if params.get("seed") == -1:
        del params["seed"]
    return params


def unheeded(options: dict[str, Any] | None) -> list[str]:
    """Return the places of options that mean nothing here, such as `options.num_ctx`: the context is the server's."""
    return [f"options.{name[:40]}" for name in options or () if name not in Options.__struct_fields__]


def structure(format: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the parameter for `format`: "json", a schema, or "" for free text.

    Raises:
        InvalidRequest: it is none of these.
    """
    if format in (None, ""):
        return {}
    if format == "json":
        return {"structured_outputs": StructuredOutputs(json_object=True, param="format")}
    if isinstance(format, dict):
        return {"structured_outputs": StructuredOutputs(json=format, param="format")}
    raise InvalidRequest('format must be "json" or a JSON schema', "format")


def thinking(think: bool | str | None, context: ServerContext) -> dict[str, Any]:
    """Return the variables of the chat template for `think`.

    Raises:
        InvalidRequest: it is no level, or the model cannot think.
    """
    if think is None or think == "":
        return {}
    if think is not False and not context.parsers.reasoning:
        raise InvalidRequest(f"'{context.model_name}' does not support thinking", "think")
    if isinstance(think, bool):
        return template_kwargs(None, enable_thinking=think)
    if think not in _LEVELS:
        raise InvalidRequest("think must be true, false, low, medium, high or max", "think")
    return template_kwargs(None, reasoning_effort=_LEVELS[think])


def check_keep_alive(keep_alive: float | str | None) -> None:
    """Check a time to keep the model for, which is without effect: the one model of this server stays.

    Raises:
        InvalidRequest: it is no duration.
    """
    if isinstance(keep_alive, str) and keep_alive and not _DURATION.fullmatch(keep_alive):
        raise InvalidRequest(f"keep_alive: {keep_alive[:40]!r} is no duration such as 5m", "keep_alive")
