"""Write replies as llama.cpp's server does: one object, or events of which the last says how it ended and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.plan import TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import PING, UsageCounter, finite, positions, token_bytes
from tokenmill.serving.server.http.errors import ErrorBody, error_body
from tokenmill.serving.server.llama_cpp.fields import Shown

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

    def __init__(self, model: str, prompts: Sequence[GenerateText], shown: Shown) -> None:
        """Write replies to prompts; the last object is cut down to `shown.paths`, named by their last part."""
        params = prompts[0].params
        self._model = model
        self._settings = settings(params)
        self._is_list = len(prompts) * params.n > 1
        self._shown = shown
        self._timer = StreamTimer()
        self._num_predicted: dict[int, int] = {}
        self._prompt: dict[int, tuple[int, int]] = {}  # tokens of its prompt, and how many were cached

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole reply: one object, or a list of them where several texts were asked for."""
        for index, output in outputs.items():
            self._note(index, output)
        replies = [self._whole(index, outputs[index], usage) for index in sorted(outputs)]
        return msgspec.json.encode(replies if self._is_list else replies[0])

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the event of a delta, and that of the end behind the last."""
        self._note(index, output)
        events = b""
        if output.text or (self._shown.tokens and output.token_ids) or (self._shown.probabilities and output.logprobs):
            events = _event(self._delta(index, output))
        if output.finish_reason is not None:
            sent = msgspec.structs.replace(output, text="", token_ids=[], logprobs=None)
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
        # The last output of a request that was aborted knows neither.
        whole, cached = self._prompt.get(index, (0, 0))
        self._prompt[index] = max(whole, output.num_prompt_tokens), max(cached, output.num_cached_tokens)

    def _delta(self, index: int, output: TextOutput) -> dict[str, Any]:
        tokens = output.token_ids if self._shown.tokens else []
        reply = {"index": index, "content": output.text, "tokens": tokens, "stop": False}
        if self._shown.probabilities:
            reply["completion_probabilities"] = [_likely(output, position) for position in positions(output)]
        return reply

    def _whole(self, index: int, output: TextOutput, usage: UsageCounter) -> dict[str, Any]:
        num_prompt_tokens, num_cached_tokens = self._prompt[index]
        reply = self._delta(index, output) | {
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_predicted[index],
            "tokens_evaluated": num_prompt_tokens,
            "tokens_cached": num_cached_tokens,
            "generation_settings": self._settings,
            "truncated": False,
            "stop_type": _stop_type(output),
            "stopping_word": output.stop_reason if isinstance(output.stop_reason, str) else "",
            "timings": msgspec.to_builtins(self._timer.timings(usage)),
        }
        return reply if self._shown.paths is None else _picked(reply, self._shown.paths)


def settings(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters by llama.cpp's names."""
    return {theirs: getattr(params, ours) for ours, theirs in _SETTINGS.items()}


def _likely(output: TextOutput, position: TokenLogprobs) -> dict[str, Any]:
    """Return the token of a position, and the likeliest there, with their log probabilities."""

    def told(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(output, token_id)
        return {"id": token_id, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": finite(logprob)}

    top = [told(one.token_id, one.logprob) for one in position.top]
    return told(position.sampled.token_id, position.sampled.logprob) | {"top_logprobs": top}


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
