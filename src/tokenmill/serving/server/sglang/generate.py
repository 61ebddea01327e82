"""Serve SGLang's routes: POST /generate, its native form of a completion, and two small ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import MAX_CHOICES, GenerationCall, messages_of, split_prompts
from tokenmill.serving.server.generation.fields import Int32, Int64, SamplingFields, TokenId, given_params
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.writer import (
    DONE,
    PING,
    ReplyWriter,
    UsageCounter,
    finite,
    positions,
    token_bytes,
)
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.http.errors import error_body
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.request_id import RequestId
from tokenmill.serving.server.sglang.pieces import PiecewiseFields, PieceWriter, piecewise_call

DEFAULT_MAX_TOKENS = 128

# SGLang's name -> ours.
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}


class NativeSampling(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The field `sampling_params` with SGLang's names; `json_schema` is the text of a schema."""

    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    spaces_between_special_tokens: bool | None = None
    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    sampling_seed: Int64 | None = None
    no_stop_trim: bool | None = None


class NativeBody(PiecewiseFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /generate: one prompt or a list of them, as text or as token ids; or Mini-SGLang's, with `prompt`."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    # Refused unless they ask for nothing.
    lora_path: None = None
    image_data: None = None
    logprob_start_len: Literal[-1] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Int32 | None = None
    return_hidden_states: Literal[False] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: RequestId | None = None
    priority: Int32 | None = None


class NativeRoute:
    """The handler of /generate."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete one or more prompts."""
        context = self._context
        body, call, prompts = await read_as(request, NativeBody, context.bodies, self._read, is_strict=True)
        label = body.rid or request.state.request_id
        writer: ReplyWriter = PieceWriter()
        if body.prompt is None:
            writer = NativeWriter(label, _is_list(body) or prompts[0].params.n > 1, body)
        return GenerationReply(context, call, prompts, writer, label)

    def _read(self, body: NativeBody) -> tuple[NativeBody, GenerationCall, list[GenerateText]]:
        calls = native_calls(body)
        prompts = [prompt for call in calls for prompt in messages_of(call, self._context)]
        counts = [prompt.params.n for prompt in prompts]
        if len(set(counts)) > 1 or sum(counts) > MAX_CHOICES:
            raise InvalidRequest(f"n must be the same everywhere, for at most {MAX_CHOICES} choices", "n")
        return body, calls[0], prompts


class SglangRoutes:
    """The handlers of the routes besides /generate: the model's name, and emptying the prefix cache."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def model_info(self, _request: Request) -> Response:
        """Show the model by its name in the API; its path stays private."""
        ready = self._context.ready
        names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), self._context.model_name)
        senses = dict.fromkeys(("has_image_understanding", "has_audio_understanding"), False)
        facts = {"is_generation": True, "architectures": [ready.architecture], "max_model_len": ready.max_model_len}
        return json_response(names | facts | senses)

    async def flush_cache(self, _request: Request) -> Response:
        """Forget all cached prefixes, unless requests are running."""
        if not await self._context.engines.reset_prefix_cache(False):
            raise InvalidRequest("requests are running: the cache is not flushed")
        return PlainTextResponse("Cache flushed.\n")


def native_calls(body: NativeBody) -> list[GenerationCall]:
    """Return the calls that a body asks for: one for all prompts, or one each if each has its own parameters.

    Raises:
        InvalidRequest: naming the field at fault; of sampling parameters by our name where SGLang's differs.
    """
    if body.prompt is not None:
        return [piecewise_call(body, body.prompt)]
    if body.max_tokens is not None or body.ignore_eos is not None:
        raise InvalidRequest("max_tokens and ignore_eos go with prompt; text has sampling_params", "max_tokens")
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", "text")
    name, given = ("input_ids", body.input_ids or []) if body.text is None else ("text", body.text)
    prompts = split_prompts(given, name)
    own = NativeSampling() if body.sampling_params is None else body.sampling_params
    if not isinstance(own, list):
        return [_call(body, prompts, own)]
    if not _is_list(body) or len(own) != len(prompts):
        raise InvalidRequest(f"{len(own)} sampling_params for {len(prompts)} prompts", "sampling_params")
    return [_call(body, [prompt], params) for prompt, params in zip(prompts, own, strict=True)]


def _call(body: NativeBody, prompts: Sequence[str | list[int]], own: NativeSampling) -> GenerationCall:
    params = given_params(own)
    params.update((ours, value) for name, ours in _RENAMED.items() if (value := getattr(own, name)) is not None)
    if body.return_logprob:
        params["logprobs"] = body.top_logprobs_num or 0
    constraints: dict[str, Any] = {"json": own.json_schema, "regex": own.regex, "grammar": own.ebnf}
    if wanted := {name: value for name, value in constraints.items() if value is not None}:
        params["structured_outputs"] = StructuredOutputs(**wanted, param="sampling_params")
    return GenerationCall(
        params=params,
        prompts=prompts,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs_field="top_logprobs_num",
        priority=body.priority,
        stream=body.stream,
    )


class NativeWriter:
    """A `ReplyWriter` for SGLang's documents; each event holds all of the text so far."""

    ping = PING

    def __init__(self, label: str, is_list: bool, body: NativeBody) -> None:
        self._label = label
        self._is_list = is_list
        self._body = body
        self._began = time.monotonic()
        self._sums: dict[int, _Sum] = {}

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the reply as JSON: one document, or a list of them."""
        replies = [self._add(index, outputs[index]) for index in sorted(outputs)]
        return msgspec.json.encode(replies if self._is_list else replies[0])

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return an event with all of the text so far."""
        reply = self._add(index, output)
        if self._is_list:
            reply["index"] = index
        return b"data: " + msgspec.json.encode(reply) + b"\n\n"

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return `[DONE]`."""
        return DONE

    def failure(self, error: Exception) -> bytes:
        """Return an error event and `[DONE]`."""
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
                (finite(e.logprob), e.token_id, self._token_text(output, e.token_id))
                for e in (position.sampled, *position.top)
            ]
            total.logprobs.append(entries[0])
            total.top_logprobs.append(entries[1:])

    def _token_text(self, output: TextOutput, token_id: int) -> str | None:
        return token_bytes(output, token_id).decode("utf-8", "replace") if self._body.return_text_in_logprobs else None


class _Sum:
    """The output of one continuation so far."""

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


def _is_list(body: NativeBody) -> bool:
    """Return True if the client gave a list of prompts, even of one."""
    return isinstance(body.text, list) or isinstance((body.input_ids or [0])[0], list)
