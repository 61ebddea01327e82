"""Wait for what comes about in other threads and processes: one deadline for all tests.

Long enough for a machine that does ten other things; a slower one sets `TOKENMILL_TEST_PATIENCE`, a factor. A test that
waits like this says nothing about how fast something is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

SECONDS = 60.0
# Seconds between two questions: of the first ones, and of those that come after half a second. Fifty a second take half
# a processor from what they wait for.
FIRST_PAUSE, PAUSE = 0.02, 0.1
NUM_FIRST = 25
Found = TypeVar("Found")


def patience(seconds: float = SECONDS) -> float:
    """Return for how long to wait, as the machine asks for it."""
    return seconds * float(os.environ.get("TOKENMILL_TEST_PATIENCE", "1"))


def eventually(
    condition: Callable[[], Found],
    say: Callable[[], object] | str = "",
    *,
    seconds: float = SECONDS,
    pause: Callable[[float], object] = time.sleep,
) -> Found:
    """Ask for a condition until it holds.

    Args:
        condition: what it returns is true once it holds.
        say: what a failure adds.
        seconds: see `patience`.
        pause: spends the time between two questions.

    Returns:
        The first true value.

    Raises:
        AssertionError: it did not come about in time.
    """
    deadline = time.monotonic() + patience(seconds)
    for number in itertools.count():
        if found := condition():
            break
        assert time.monotonic() < deadline, _in_vain(seconds, say)
        pause(FIRST_PAUSE if number < NUM_FIRST else PAUSE)
    return found


async def eventually_async(
    condition: Callable[[], Found | Awaitable[Found]],
    say: Callable[[], object] | str = "",
    *,
    seconds: float = SECONDS,
) -> Found:
    """Ask as `eventually` does, while other tasks go on; the condition may be a coroutine function."""
    deadline = time.monotonic() + patience(seconds)
    while True:
        asked = condition()
        found = await asked if isinstance(asked, Awaitable) else asked
        if found:
            return found
        assert time.monotonic() < deadline, _in_vain(seconds, say)
        await asyncio.sleep(0.005)


def join(thread: threading.Thread, say: Callable[[], object] | str = "") -> None:
    """Wait for the end of a thread.

    Raises:
        AssertionError: it goes on; `say` is what the failure adds.
    """
    thread.join(patience())
    assert not thread.is_alive(), _in_vain(SECONDS, say or f"{thread.name} has not ended")


def _in_vain(seconds: float, say: Callable[[], object] | str) -> str:
    return f"waited {patience(seconds):g} s in vain: {say() if callable(say) else say or 'it does not come about'}"
