"""What chat and text replies have in common: usage, the fields of a document, and how chunks are put together."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tokenmill.messages import TextOutput, TokenLogprobs
from tokenmill.request import FinishReason

_ENCODER = msgspec.json.Encoder()

LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct):
    """OpenAI's `prompt_tokens_details`."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Adds up the usage of a call. A prompt that n continuations share counts once."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0

    def add(self, index: int, output: TextOutput) -> None:
        """Take in a delta of choice `index`."""
        self._completion_tokens += len(output.token_ids)
        if index % self._n == 0:
            self._prompt[index] = (output.num_prompt_tokens, output.num_cached_tokens)

    def usage(self) -> Usage:
        """The usage so far."""
        prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompt.values())
        cached_tokens = sum(num_cached for _, num_cached in self._prompt.values())
        total = prompt_tokens + self._completion_tokens
        return Usage(prompt_tokens, self._completion_tokens, total, PromptTokensDetails(cached_tokens))


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


class ChunkWriter:
    """Builds the server-sent events of one reply around a prefix that is encoded once."""

    def __init__(self, head: ReplyHead, usage_is_wanted: bool) -> None:
        self._prefix = b"data: " + _ENCODER.encode(head)[:-1] + b',"choices":'
        self._no_usage = b',"usage":null}\n\n' if usage_is_wanted else b"}\n\n"

    def chunk(self, choices: list[Any], usage: Usage | None = None) -> bytes:
        """One event."""
        end = self._no_usage if usage is None else b',"usage":' + _ENCODER.encode(usage) + b"}\n\n"
        return self._prefix + _ENCODER.encode(choices) + end


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
