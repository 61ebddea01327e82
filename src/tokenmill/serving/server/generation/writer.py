"""Define what all writers of replies share: their protocol, the usage of a call, and log probabilities in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import TokenLogprobs

DONE = b"data: [DONE]\n\n"

# A comment, which clients skip. A blank line after it would be an empty event, at which some clients stumble.
PING = b": ping\n"

LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(msgspec.Struct):
    """OpenAI's object `prompt_tokens_details`, and what it has no names for.

    Attributes:
        local_cached_tokens, external_cached_tokens: those that the engine had, and those whose KV came from elsewhere;
            said only if some did.
        volatile_blocks: those that were dropped or moved, if any.
    """

    cached_tokens: int
    local_cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    external_cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    volatile_blocks: list[str] | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    """OpenAI's object `completion_tokens_details`."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's object `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class UsageCounter:
    """Adds up the usage of a call; a prompt that n continuations share counts once."""

    def __init__(self, n: int, volatile: Sequence[str] = ()) -> None:
        """`volatile`: see `GenerateText`."""
        self._n = n
        self._volatile = list(volatile) or msgspec.UNSET
        self._prompt: dict[int, tuple[int, int, int]] = {}
        self._completion_tokens = 0
        self._reasoning: dict[int, int] = {}

    def add(self, index: int, output: TextOutput) -> None:
        """Count a delta of choice `index`."""
        self._completion_tokens += len(output.token_ids)
        if output.num_reasoning_tokens:
            self._reasoning[index] = output.num_reasoning_tokens
        if index % self._n == 0:
            # The last output of a request that was aborted knows none of them.
            told = output.num_prompt_tokens, output.num_cached_tokens, output.num_external_cached_tokens
            known = self._prompt.get(index, (0, 0, 0))
            self._prompt[index] = max(known[0], told[0]), max(known[1], told[1]), max(known[2], told[2])

    def usage(self) -> Usage:
        """Return the usage so far."""
        prompt_tokens, cached, external = (
            sum(counts) for counts in zip((0, 0, 0), *self._prompt.values(), strict=True)
        )
        details = PromptTokensDetails(cached, volatile_blocks=self._volatile)
        if external:
            details.local_cached_tokens, details.external_cached_tokens = cached - external, external
        total = prompt_tokens + self._completion_tokens
        return Usage(
            prompt_tokens,
            self._completion_tokens,
            total,
            details,
            CompletionTokensDetails(sum(self._reasoning.values())),
        )


class ReplyWriter(Protocol):
    """Writes the bytes of one API's reply: a document or events; `index` numbers the continuations of a call.

    Attributes:
        ping: a sign of life for a stream that is silent for long.
    """

    ping: bytes

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the body of a reply that is not streamed, from the whole output of each continuation."""
        ...

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the events for a delta, or b"" if it has nothing worth sending."""
        ...

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the events after the last delta."""
        ...

    def failure(self, error: Exception) -> bytes:
        """Return the events that end a stream early."""
        ...


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent, which has no -inf."""
    return max(logprob, LOWEST_LOGPROB)


def token_bytes(output: TextOutput, token_id: int) -> bytes:
    """Return the bytes of a token that appears in the output's logprobs."""
    return (output.token_bytes or {}).get(token_id, b"")


def positions(output: TextOutput) -> list[TokenLogprobs]:
    """Return the logprobs of an output by position; empty if they were not asked for."""
    return output.logprobs or []
