"""POST /generate: SGLang's native form of a completion."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.messages import GenerateText, TextOutput
from tokenmill.request import FinishReason
from tokenmill.sampling_params import SamplingParams
from tokenmill.server.body import read_body
from tokenmill.server.completions import MAX_PROMPTS, check_num_choices
from tokenmill.server.context import ServerContext
from tokenmill.server.errors import error_body
from tokenmill.server.fields import Int32, Int64, Label, SamplingFields, TokenId, check_logprobs, shared_params
from tokenmill.server.reply import GenerationReply
from tokenmill.server.reply_format import DONE, StreamPlan, UsageCounter, finite, positions, spell

DEFAULT_MAX_TOKENS = 128

# SGLang's name -> ours.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}


class NativeSampling(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params`, with SGLang's names."""

    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    sampling_seed: Int64 | None = None
    no_stop_trim: bool | None = None


class NativeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /generate: one prompt, or a list of them; as text or as token ids."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling = msgspec.field(default_factory=NativeSampling)
    return_logprob: bool = False
    top_logprobs_num: Int32 = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: Label | None = None
    priority: Int32 | None = None


class NativeRoute:
    """Answers such requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete one prompt or several."""
        context = self._context
        body = await read_body(request, NativeBody)
        logprobs = None
        if body.return_logprob:
            check_logprobs(body.top_logprobs_num, "top_logprobs_num", context.max_logprobs)
            logprobs = body.top_logprobs_num
        params = _sampling_params(body.sampling_params, context.default_sampling, logprobs)
        prompts, is_list = _prompts(body)
        check_num_choices(len(prompts), params.n)
        priority = context.check_priority(body.priority)
        messages = [GenerateText(ids=[], params=params, priority=priority, **prompt) for prompt in prompts]
        label = body.rid or request.state.request_id
        writer = NativeWriter(label, is_list or params.n > 1, body)
        plan = StreamPlan(stream=body.stream, include_usage=False, continuous_usage=False, timeout=None)
        return GenerationReply(context, messages, writer, label, plan)


class NativeWriter:
    """Writes SGLang's documents: a list of them for several continuations. Each event holds all of the text so far."""

    def __init__(self, label: str, is_list: bool, body: NativeBody) -> None:
        self._label = label
        self._is_list = is_list
        self._body = body
        self._began = time.monotonic()
        self._sums: dict[int, _Sum] = {}

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        replies = [self._add(index, outputs[index]) for index in sorted(outputs)]
        return msgspec.json.encode(replies if self._is_list else replies[0])

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        reply = self._add(index, output)
        if self._is_list:
            reply["index"] = index
        return b"data: " + msgspec.json.encode(reply) + b"\n\n"

    def end(self, usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        return DONE

    def failure(self, error: Exception) -> bytes:
        """See `ReplyWriter`."""
        return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE

    def _add(self, index: int, output: TextOutput) -> dict[str, Any]:
        total = self._sums.setdefault(index, _Sum())
        total.text += output.text
        total.token_ids += output.token_ids
        total.num_cached_tokens = max(total.num_cached_tokens, output.num_cached_tokens)
        meta: dict[str, Any] = {
            "id": self._label,
            "finish_reason": _finish_reason(output, len(total.token_ids)),
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": len(total.token_ids),
            "cached_tokens": total.num_cached_tokens,
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._body.return_logprob:
            self._add_logprobs(total, output)
            meta["output_token_logprobs"] = total.logprobs
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = total.top_logprobs
        return {"text": total.text, "output_ids": total.token_ids, "meta_info": meta}

    def _add_logprobs(self, total: _Sum, output: TextOutput) -> None:
        for position in positions(output):
            entries = [
                (finite(e.logprob), e.token_id, self._spelled(output, e.token_id))
                for e in (position.sampled, *position.top)
            ]
            total.logprobs.append(entries[0])
            total.top_logprobs.append(entries[1:])

    def _spelled(self, output: TextOutput, token_id: int) -> str | None:
        return spell(output, token_id).decode("utf-8", "replace") if self._body.return_text_in_logprobs else None


class _Sum:
    """What one continuation has brought so far."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.logprobs: list[tuple[float, int, str | None]] = []
        self.top_logprobs: list[list[tuple[float, int, str | None]]] = []


def _finish_reason(output: TextOutput, num_tokens: int) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        case FinishReason.STOP:
            return {"type": "stop", "matched": output.stop_reason}
        case reason:
            return {"type": reason.value}


def _prompts(body: NativeBody) -> tuple[list[dict[str, Any]], bool]:
    """The prompts as fields of `GenerateText`, and whether a list of them was given."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", "text")
    if isinstance(body.text, str):
        return [{"text": body.text}], False
    if body.text is not None:
        prompts: list[dict[str, Any]] = [{"text": text} for text in body.text]
    else:
        ids = body.input_ids or []
        if ids and all(isinstance(one, int) for one in ids):
            return [{"token_ids": ids}], False
        if any(isinstance(one, int) for one in ids):
            raise InvalidRequest("input_ids must be token ids, or lists of them", "input_ids")
        prompts = [{"token_ids": one} for one in ids]
    param = "input_ids" if body.text is None else "text"
    if not prompts:
        raise InvalidRequest(f"{param} must not be empty", param)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompts)} prompts in one request; at most {MAX_PROMPTS}", param)
    return prompts, True


def _sampling_params(own: NativeSampling, defaults: Mapping[str, Any], logprobs: int | None) -> SamplingParams:
    """The sampling parameters of a request: its own over the model's defaults.

    Raises:
        InvalidRequest: a value outside its range; the name is OpenAI's where SGLang's differs.
    """
    fields = {"max_tokens": DEFAULT_MAX_TOKENS} | dict(defaults) | shared_params(own)
    fields.update((ours, value) for name, ours in _RENAMED.items() if (value := getattr(own, name)) is not None)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    return SamplingParams(**fields)
