"""What chat and text replies have in common: usage, the fields of a document, and how chunks are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from tokenmill.messages import TextOutput, TokenLogprobs
from tokenmill.request import FinishReason
from tokenmill.server.errors import error_body
from tokenmill.server.fields import GenerationFields

_ENCODER = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"

LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct):
    """OpenAI's `prompt_tokens_details`."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """OpenAI's `completion_tokens_details`."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class UsageCounter:
    """Adds up the usage of a call. A prompt that n continuations share counts once."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0
        self._reasoning: dict[int, int] = {}

    def add(self, index: int, output: TextOutput) -> None:
        """Take in a delta of choice `index`."""
        self._completion_tokens += len(output.token_ids)
        if output.num_reasoning_tokens:
            self._reasoning[index] = output.num_reasoning_tokens
        if index % self._n == 0:
            # The last output of a request that was aborted knows neither.
            prompt_tokens, cached_tokens = self._prompt.get(index, (0, 0))
            self._prompt[index] = (
                max(prompt_tokens, output.num_prompt_tokens),
                max(cached_tokens, output.num_cached_tokens),
            )

    def usage(self) -> Usage:
        """The usage so far."""
        prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompt.values())
        cached_tokens = sum(num_cached for _, num_cached in self._prompt.values())
        total = prompt_tokens + self._completion_tokens
        return Usage(
            prompt_tokens,
            self._completion_tokens,
            total,
            PromptTokensDetails(cached_tokens),
            CompletionTokensDetails(sum(self._reasoning.values())),
        )


class StreamPlan(msgspec.Struct, frozen=True):
    """How a reply is to be sent."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout: float | None

    @classmethod
    def of(cls, body: GenerationFields) -> StreamPlan:
        """Read it from a request's fields."""
        options = body.stream_options
        return cls(
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            timeout=body.timeout,
        )


class ReplyHead(msgspec.Struct):
    """The fields that all chunks of a reply, or its one document, begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ReplyFormat(Protocol):
    """How one route spells its choices. `index` numbers the choices of a call."""

    def chunk_choices(self, index: int, output: TextOutput) -> list[Any]:
        """The entries of `choices` in the chunk for a delta; none: no chunk is worth sending."""
        ...

    def choice(self, index: int, output: TextOutput) -> Any:
        """The entry of `choices` in the one document of a reply that is not streamed."""
        ...


class ReplyWriter(Protocol):
    """All bytes of one API's reply: one document, or events. `index` numbers the continuations of a call."""

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """The body of a reply that is not streamed, from the whole output of each continuation."""
        ...

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """The events for a delta; none (b""): nothing of it is worth sending."""
        ...

    def end(self, usage: UsageCounter) -> bytes:
        """The events after the last delta."""
        ...

    def failure(self, error: Exception) -> bytes:
        """The events that end a stream in the middle."""
        ...


class ChoiceWriter:
    """Writes OpenAI's documents and chunks: a head that is encoded once, the choices as `format` spells them, usage."""

    def __init__(
        self,
        head: ReplyHead,
        format: ReplyFormat,
        plan: StreamPlan,
        extras: Callable[[TextOutput], msgspec.Struct] | None = None,
    ) -> None:
        """`extras`: fields beside the choices that an output brings."""
        self._head = head
        self._format = format
        self._plan = plan
        self._extras = extras
        self._prefix = b"data: " + _ENCODER.encode(head)[:-1] + b',"choices":'
        self._no_usage = b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        choices = [self._format.choice(index, outputs[index]) for index in sorted(outputs)]
        whole = document(self._head, choices, usage.usage())
        return whole[:-1] + self._extra_fields(outputs[0]) + b"}"

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        choices = self._format.chunk_choices(index, output)
        if not choices:
            return b""
        return self._chunk(choices, usage if self._plan.continuous_usage else None, self._extra_fields(output))

    def end(self, usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        return (self._chunk([], usage) if self._plan.include_usage else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        """See `ReplyWriter`."""
        return b"data: " + _ENCODER.encode(error_body(error)) + b"\n\n" + DONE

    def _extra_fields(self, output: TextOutput) -> bytes:
        if self._extras is None or output.prompt is None:
            return b""
        fields = _ENCODER.encode(self._extras(output))[1:-1]
        return b"," + fields if fields else b""

    def _chunk(self, choices: list[Any], usage: UsageCounter | None, extras: bytes = b"") -> bytes:
        end = self._no_usage if usage is None else b',"usage":' + _ENCODER.encode(usage.usage()) + b"}\n\n"
        return self._prefix + _ENCODER.encode(choices) + extras + end


class DocumentWriter:
    """Writes a reply that is never streamed, from all outputs at once."""

    def __init__(self, spell: Callable[[Mapping[int, TextOutput], UsageCounter], Any]) -> None:
        self._spell = spell

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """See `ReplyWriter`."""
        return _ENCODER.encode(self._spell(outputs, usage))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """There are none."""
        return b""

    def end(self, usage: UsageCounter) -> bytes:
        """There are none."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """There are none."""
        return b""


def document(head: ReplyHead, choices: list[Any], usage: Usage) -> bytes:
    """The body of a reply that is not streamed."""
    rest = _ENCODER.encode({"choices": choices, "usage": usage})
    return _ENCODER.encode(head)[:-1] + b"," + rest[1:]


def finish_reason_text(reason: FinishReason | None) -> str | None:
    """OpenAI's word for it."""
    return None if reason is None else reason.value


def finite(logprob: float) -> float:
    """JSON has no -inf."""
    return max(logprob, LOWEST_LOGPROB)


def spell(output: TextOutput, token_id: int) -> bytes:
    """The bytes of a token that the output's logprobs name."""
    return (output.token_bytes or {}).get(token_id, b"")


def positions(output: TextOutput) -> list[TokenLogprobs]:
    """The logprobs of an output, none if they were not asked for."""
    return output.logprobs or []
