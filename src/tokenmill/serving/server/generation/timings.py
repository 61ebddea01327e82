"""Measure a stream as its client sees it, in the form of llama.cpp's `prompt_progress` and `timings`."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tokenmill.core import messages
from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.generation.writer import UsageCounter


class PromptProgress(msgspec.Struct):
    """The computed part of a prompt, in llama.cpp's fields and one more.

    `cache`: tokens of it that the prefix cache supplied. `left_ms`: an estimate; None: there is none yet.
    """

    total: int
    cache: int
    processed: int
    time_ms: float
    left_ms: float | None = 0.0


class Timings(msgspec.Struct):
    """Tokens and milliseconds of a call. Prompt tokens are those that were computed, not those of the cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class StreamTimer:
    """Notes when the outputs of a call come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began

    def note(self, output: TextOutput) -> None:
        """Note an output; the first one with tokens ends the prompt, and the time that the call waited before it."""
        if output.token_ids:
            self._last = self._clock()
            self._first = self._last if self._first is None else self._first
        if self._first is not None:
            # Only the last output says when the engine began; an engine that went on for a dead one began later.
            self._began = max(self._began, min(output.scheduled_at, self._first))

    def partial(self, progress: messages.PromptProgress) -> PromptProgress:
        """Return the progress of a prompt that is being computed."""
        left = None if progress.seconds_left is None else _milliseconds(progress.seconds_left)
        passed = _milliseconds(self._clock() - self._began)
        counts = progress.num_tokens, progress.num_cached_tokens, progress.num_computed_tokens
        return PromptProgress(*counts, passed, left)

    def progress(self, usage: UsageCounter) -> PromptProgress:
        """Return the progress of the prompts that have a token."""
        counted = usage.usage()
        total, cached = counted.prompt_tokens, counted.prompt_tokens_details.cached_tokens
        return PromptProgress(total, cached, total, _milliseconds(self._last - self._began))

    def timings(self, usage: UsageCounter) -> Timings:
        """Return the timings so far."""
        counted = usage.usage()
        cached = counted.prompt_tokens_details.cached_tokens
        first = self._last if self._first is None else self._first
        prompt = _rates(counted.prompt_tokens - cached, _milliseconds(first - self._began))
        # The first token comes with the prompt.
        predicted = _rates(counted.completion_tokens, _milliseconds(self._last - first))
        return Timings(cached, *prompt, *predicted)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rates(count: int, milliseconds: float) -> tuple[int, float, float, float]:
    """Return a count, its milliseconds, those of each, and the count per second; 0 where there is nothing to divide."""
    each = round(milliseconds / count, 3) if count else 0.0
    return count, milliseconds, each, round(1000 * count / milliseconds, 3) if milliseconds else 0.0
