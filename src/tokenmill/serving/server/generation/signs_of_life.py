"""Notice that a stream has been silent for too long, so that it can send a sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SilenceTimer:
    """Calls `ring` whenever nothing has been sent for some seconds; it never sends anything itself.

    Attributes:
        is_due: it has rung, and nothing has been sent since.
    """

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        """Start to count; 0 seconds: it never rings."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._ring = ring
        self._last = self._loop.time()
        self.is_due = False
        self._timer = self._loop.call_later(seconds, self._look) if seconds else None

    def sent(self) -> None:
        """Note that something was sent."""
        self._last = self._loop.time()
        self.is_due = False

    def close(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left = self._last + self._seconds - self._loop.time()
        if left <= 0:
            self.is_due = True
            self._ring()
            left = self._seconds
        # One timer a stream, however many deltas it sends.
        self._timer = self._loop.call_later(left, self._look)
