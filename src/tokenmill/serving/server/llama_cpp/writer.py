"""Write replies as llama.cpp's server does: one object, or events of which the last says how it ended and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import PING, UsageCounter
from tokenmill.serving.server.http.errors import ErrorBody, error_body

# Our name -> llama.cpp's, of the parameters that `generation_settings` shows.
_SETTINGS = {
    "max_tokens": "n_predict",
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
}


class CompletionWriter:
    """A `ReplyWriter` for llama.cpp's completions."""

    ping = PING

    def __init__(
        self, *, model: str, params: SamplingParams, returns_tokens: bool, paths: Sequence[str] | None
    ) -> None:
        """Write replies; `paths`: cut the last object down to these fields, named by their last part."""
        self._model = model
        self._settings = {theirs: getattr(params, ours) for ours, theirs in _SETTINGS.items()}
        self._is_list = params.n > 1
        self._returns_tokens = returns_tokens
        self._paths = paths
        self._timer = StreamTimer()
        self._num_predicted: dict[int, int] = {}

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole reply: one object, or a list of them where several fillings were asked for."""
        for index, output in outputs.items():
            self._note(index, output)
        replies = [self._whole(index, outputs[index], usage) for index in sorted(outputs)]
        return msgspec.json.encode(replies if self._is_list else replies[0])

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the event of a delta, and that of the end behind the last."""
        self._note(index, output)
        events = b""
        if output.text or (self._returns_tokens and output.token_ids):
            events = _event(self._delta(index, output))
        if output.finish_reason is not None:
            sent = msgspec.structs.replace(output, text="", token_ids=[])
            events += _event(self._whole(index, sent, usage))
        return events

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return nothing: the last event says that it is the last."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """Return an event with the error."""
        return _event(error_body(error))

    def _note(self, index: int, output: TextOutput) -> None:
        self._timer.note(output)
        self._num_predicted[index] = self._num_predicted.get(index, 0) + len(output.token_ids)

    def _delta(self, index: int, output: TextOutput) -> dict[str, Any]:
        tokens = output.token_ids if self._returns_tokens else []
        return {"index": index, "content": output.text, "tokens": tokens, "stop": False}

    def _whole(self, index: int, output: TextOutput, usage: UsageCounter) -> dict[str, Any]:
        counted = usage.usage()
        reply = self._delta(index, output) | {
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_predicted[index],
            "tokens_evaluated": counted.prompt_tokens,
            "tokens_cached": counted.prompt_tokens_details.cached_tokens,
            "generation_settings": self._settings,
            "truncated": False,
            "stop_type": _stop_type(output),
            "stopping_word": output.stop_reason if isinstance(output.stop_reason, str) else "",
            "timings": msgspec.to_builtins(self._timer.timings(usage)),
        }
        return reply if self._paths is None else _picked(reply, self._paths)


def _stop_type(output: TextOutput) -> str:
    """Return llama.cpp's word for the end: eos, word, limit, or none."""
    if output.finish_reason is FinishReason.LENGTH:
        return "limit"
    if output.finish_reason is not FinishReason.STOP:
        return "none"
    return "word" if isinstance(output.stop_reason, str) else "eos"


def _picked(reply: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields at the paths; those that lead nowhere are left out."""
    found = {}
    for path in paths:
        value: Any = reply
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path.rsplit("/", 1)[-1]] = value
    return found


def _event(content: Mapping[str, Any] | ErrorBody) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
