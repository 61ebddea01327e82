"""Convert the lines of `tokenmill generate`: an input line to a prompt with parameters, results to an output line.

Two forms, told apart by `body`. Plain: `{"prompt": ...}` or `{"messages": ...}` with sampling fields and an optional
`id`. Batch, as OpenAI's: `{"custom_id": ..., "body": {...}}`; its answers are the server's replies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.outputs import CompletionOutput, RequestOutput
from tokenmill.serving.batches.lines import BatchLine
from tokenmill.serving.server.generation.fields import Int32, TokenId, sampling_params
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.chat_choices import CHAT, ChatChoices
from tokenmill.serving.server.openai.chunks import PromptShown, ReplyHead, document
from tokenmill.serving.server.openai.completions import TEXT, TextChoices
from tokenmill.serving.server.openai.fields import GenerationFields, given, refuse_unsupported

# What /v1/completions gives where a body says nothing.
BATCH_TEXT_MAX_TOKENS = 16


class PromptFields(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of a plain line, and of the `body` of a batch line."""

    prompt: str | list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: Int32 | bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PlainLine(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """A line of the plain form."""

    id: str | int | None = None


class _Form(msgspec.Struct):
    """The fields of a line that tell its form and label."""

    body: msgspec.Raw = msgspec.Raw()
    custom_id: Any = None
    id: Any = None


class Job(msgspec.Struct, frozen=True):
    """One input line, ready to run.

    Attributes:
        line: its number, from 1.
        digest: of its bytes, so that a resumed run detects a changed input.
        label: the line's own `id` or `custom_id`.
        prompt: a text, token ids, or messages.
    """

    line: int
    digest: str
    label: str | int | None
    is_batch: bool
    prompt: Any
    params: SamplingParams
    template_options: dict[str, Any]

    def answer(self, finished: RequestOutput, model: str) -> dict[str, Any]:
        """Return the output line of a finished job; `model` is named in batch answers."""
        results = finished.outputs
        failed = next((result for result in results if result.finish_reason is FinishReason.ERROR), None)
        if failed is not None:
            return error_line(self.line, self.digest, self.label, self.is_batch, failed.error or "failed")
        outputs = [_text_output(result, finished) for result in results]
        head = _head(self.line, self.digest, self.label, self.is_batch)
        if self.is_batch:
            return {**head, "response": {"status_code": 200, "body": self._body(outputs, model)}, "error": None}
        usage = _usage(outputs)
        return {**head, "choices": [_choice(result) for result in results], "usage": usage}

    def _body(self, outputs: Sequence[TextOutput], model: str) -> msgspec.Raw:
        is_chat = isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)
        encoders = (CHAT, ChatChoices()), (TEXT, TextChoices(PromptShown(False, False)))
        kind, encoder = encoders[0 if is_chat else 1]
        head = ReplyHead(f"batch-{self.line}", kind, int(time.time()), model, "")
        choices = [encoder.choice(index, output) for index, output in enumerate(outputs)]
        return msgspec.Raw(document(head, choices, _usage(outputs)))


def read_job(line: int, raw: bytes, defaults: Mapping[str, Any]) -> Job:
    """Read the job of an input line.

    Args:
        defaults: sampling parameters that the line does not give.

    Raises:
        InvalidRequest: not JSON, an unknown or unsupported field, a value out of range; names the field.
    """
    is_batch = bool(bytes(_form(raw).body))
    kind: Any = BatchLine[PromptFields] if is_batch else PlainLine
    try:
        decoded: PlainLine | BatchLine[PromptFields] = msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(str(error)) from None
    body = decoded.body if isinstance(decoded, BatchLine) else decoded
    label = decoded.custom_id if isinstance(decoded, BatchLine) else decoded.id
    refuse_unsupported(body)
    if body.stream:
        raise InvalidRequest("stream is not supported in a file", "stream")
    prompt = _prompt(body)
    options = {**(body.chat_template_kwargs or {}), **({"tools": body.tools} if body.tools else {})}
    return Job(line, digest(raw), label, is_batch, prompt, _params(body, is_batch, defaults), options)


def error_line(line: int, digest: str, label: Any, is_batch: bool, message: str) -> dict[str, Any]:
    """Return the output line of a job that cannot run."""
    error = {"message": message, "type": InvalidRequest.type}
    head = _head(line, digest, label, is_batch)
    if is_batch:
        return {**head, "response": {"status_code": InvalidRequest.status, "body": {"error": error}}, "error": None}
    return {**head, "error": error}


def refused_line(line: int, raw: bytes, message: str) -> dict[str, Any]:
    """Return the output line of an input line that is no job; carries its label if that can be read."""
    try:
        form = _form(raw)
    except InvalidRequest:
        form = _Form()
    is_batch = bool(bytes(form.body))
    return error_line(line, digest(raw), form.custom_id if is_batch else form.id, is_batch, message)


def digest(raw: bytes) -> str:
    """Return a short digest of an input line."""
    return blake2b(raw.strip(), digest_size=6).hexdigest()


def _form(raw: bytes) -> _Form:
    try:
        return msgspec.json.decode(raw, type=_Form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"not a JSON object: {error}") from None


def _prompt(body: PromptFields) -> Any:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("a line needs either prompt or messages", "prompt")
    prompt = body.messages if body.prompt is None else body.prompt
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt" if body.messages is None else "messages")
    return prompt


def _params(body: PromptFields, is_batch: bool, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.logprobs and is_batch:
        raise InvalidRequest("logprobs are not supported in batch lines", "logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None and is_batch and body.messages is None:
        max_tokens = defaults.get("max_tokens", BATCH_TEXT_MAX_TOKENS)
    params = given(body)
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    if body.logprobs is not None and body.logprobs is not False:
        params["logprobs"] = int(body.logprobs)
    return sampling_params(params, defaults)


def _head(line: int, digest: str, label: Any, is_batch: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"line": line, "input": digest}
    if label is not None:
        head["custom_id" if is_batch else "id"] = label
    return head


def _choice(result: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": result.index,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    return choice if result.logprobs is None else {**choice, "logprobs": result.logprobs}


def _text_output(result: CompletionOutput, finished: RequestOutput) -> TextOutput:
    return TextOutput(
        id="",
        text=result.text,
        token_ids=result.token_ids,
        num_prompt_tokens=finished.num_prompt_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )


def _usage(outputs: Sequence[TextOutput]) -> Any:
    counter = UsageCounter(len(outputs))
    for index, output in enumerate(outputs):
        counter.add(index, output)
    return counter.usage()
