"""Refuse requests while too many wait, before any work is spent on them, and say when to retry."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import QueueFull
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PoolInput

# A token of English and of code is about four bytes; the limit is on work, and needs no better guess.
BYTES_PER_TOKEN = 4
LONGEST_RETRY_SECONDS = 600
# The rate is measured over the last so many requests that ended.
_ENDS_KEPT = 64
# Characters of a text whose size is measured.
_LOOKED_AT = 4096


class AdmissionLimits(msgspec.Struct, frozen=True):
    """Limits on requests without a free row and on prompt tokens without a first output token; None: no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None

    @classmethod
    def from_config(cls, config: ServerConfig) -> AdmissionLimits:
        """Read the limits from the flags; each API process gets an equal share of the tokens.

        The engines count the waiting requests of all API processes together; each process counts only its own tokens.
        """
        tokens = config.max_num_queued_tokens
        return cls(config.max_num_queued_reqs, None if tokens is None else tokens // config.api_server_count)


class AdmissionControl:
    """Counts the prompt tokens that wait for a first output token, and refuses calls over the limits."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.num_rows = 0
        self.num_queued = 0
        self._tokens: dict[str, int] = {}
        self._num_tokens = 0
        self._ends: deque[float] = deque(maxlen=_ENDS_KEPT)

    def check(self, prompts: Sequence[GenerateText], num_open: int) -> None:
        """Refuse prompts that would exceed the limits.

        Args:
            num_open: requests that are open now.

        Raises:
            QueueFull: with the seconds after which the queue should have room, from the rate of the last requests.
        """
        if not num_open:
            return  # whatever it is, waiting would not make more room for it
        count = sum(prompt.num_requests for prompt in prompts)
        limit = self.limits.max_requests
        if limit is not None:
            # The engine's own number is a quarter of a second old; what was sent since is in num_open.
            waiting = max(num_open - self.num_rows, self.num_queued, 0)
            surplus = waiting + count - limit
            if surplus > 0 and (num_open + count > self.num_rows or self.num_queued):
                raise QueueFull(
                    f"{waiting} requests wait already for a row or KV pages and this call brings {count}; at most "
                    f"{limit} may wait (--max-num-queued-reqs)",
                    self._wait(surplus),
                )
        limit = self.limits.max_tokens
        if limit is not None:
            tokens = sum(estimated_tokens(prompt) for prompt in prompts)
            if self._num_tokens and self._num_tokens + tokens > limit:
                raise QueueFull(
                    f"about {self._num_tokens} prompt tokens wait already to be computed and this call brings about "
                    f"{tokens}; at most {limit} may wait (--max-num-queued-tokens)",
                    self._wait(max(1, len(self._tokens) // 2)),
                )

    def enter(self, prompt: GenerateText) -> None:
        """Count the tokens of a prompt whose requests have been sent."""
        tokens = estimated_tokens(prompt)
        for request_id, own in zip(prompt.ids, [tokens] + [0] * (len(prompt.ids) - 1), strict=True):
            self._tokens[request_id] = own
        self._num_tokens += tokens

    def started(self, request_id: str) -> None:
        """Stop counting a request whose first token has come, or that has ended."""
        self._num_tokens -= self._tokens.pop(request_id, 0)

    def ended(self, request_id: str, is_complete: bool) -> None:
        """Stop counting a request; a complete one also measures how fast the queue moves."""
        self.started(request_id)
        if is_complete:
            self._ends.append(time.monotonic())

    def _wait(self, count: int) -> int:
        """Return the seconds until `count` requests have ended, at the rate of the latest ones."""
        if len(self._ends) < 2:
            return 1
        seconds_each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(1, math.ceil(count * seconds_each)), LONGEST_RETRY_SECONDS)


def estimated_tokens(prompt: GenerateText) -> int:
    """Estimate the tokens of a prompt before it is encoded: exact for token ids, by length for text."""
    if prompt.num_estimated is not None:
        return prompt.num_estimated
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if prompt.text is not None:
        return -(-_num_bytes(prompt.text) // BYTES_PER_TOKEN)
    if prompt.texts is not None:
        return sum(map(_num_tokens, prompt.texts.inputs))
    if prompt.infill is not None:
        return -(-prompt.infill.num_characters() // BYTES_PER_TOKEN)
    return -(-sum(_num_characters(message.get("content")) for message in prompt.messages or ()) // BYTES_PER_TOKEN)


def _num_tokens(one: PoolInput) -> int:
    """Estimate the tokens of a text or a pair."""
    if one.token_ids is not None:
        return len(one.token_ids)
    return -(-(_num_bytes(one.text) + _num_bytes(one.second or "")) // BYTES_PER_TOKEN)


def _num_bytes(text: str) -> int:
    """Return the UTF-8 size of a text; estimate that of a long text from its beginning."""
    if text.isascii():
        return len(text)
    num_bytes = len(text[:_LOOKED_AT].encode("utf-8", "surrogatepass"))
    return num_bytes if len(text) <= _LOOKED_AT else num_bytes * len(text) // _LOOKED_AT


def _num_characters(content: object) -> int:
    """Count the characters of a message's text, or of the texts and addresses in its parts."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else ()
    return sum(len(value) for part in parts for value in _texts(part))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a part, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
