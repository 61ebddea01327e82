"""Whether the engine still lives and gets on: when it was last heard, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable

# Longer than the longest step of a slow machine.
SILENCE_SECONDS = 120.0


class Pulse:
    """Remembers when the last message came."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_beat = clock()
        self._is_stuck = False

    def beat(self) -> None:
        """Something was heard."""
        self._last_beat = self._clock()

    def note_stuck(self, is_stuck: bool) -> None:
        """The engine lives, and says whether its requests make progress."""
        self._is_stuck = is_stuck

    def trouble(self, num_open: int) -> str | None:
        """A sentence if requests are open and nothing was heard for too long, or none of them makes progress."""
        if self._is_stuck:
            return "the engine makes no progress with the requests that it has"
        silence = self._clock() - self._last_beat
        if not num_open or silence <= SILENCE_SECONDS:
            return None
        return f"{num_open} requests are open, but nothing was heard from the engine for {silence:.0f} seconds"
