"""Run threads that read bodies too long for the event loop, so that no stream waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# What the loop reads itself, in a few milliseconds at most whatever it is.
INLINE_BYTES = 16 << 10
# Whatever is longer takes a fraction of a second.
HUGE_BYTES = 1 << 20

R = TypeVar("R")


class BodyThreads:
    """Two threads, started when needed, so that long bodies do not wait for huge ones.

    Each reads one body at a time: both share the interpreter with the loop, which waits for a turn of each busy thread.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(1, "long-body")
        self._huge = ThreadPoolExecutor(1, "huge-body")

    async def run(self, num_bytes: int, work: Callable[[], R]) -> R:
        """Do the work that a body of this size makes, and raise what it raises."""
        if num_bytes <= INLINE_BYTES:
            return work()
        thread = self._huge if num_bytes > HUGE_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, work)
