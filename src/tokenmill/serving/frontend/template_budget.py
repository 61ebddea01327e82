"""What one rendering of a chat template may take: seconds of CPU of its own thread, and text that it builds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from tokenmill.core.errors import PromptTooCostly

# Of the largest body that is taken a template makes a prompt of a quarter of this.
LARGEST_CHARACTERS = 64 << 20
# Of all that is built, kept or not: what grows piece by piece is copied with each of them.
MOST_CHARACTERS = 16 * LARGEST_CHARACTERS
# What an item of a list takes as much memory as, in characters.
ITEM_CHARACTERS = 8
_WEIGHTS: Mapping[type, int] = MappingProxyType(
    {str: 1, bytes: 1, Markup: 1, list: ITEM_CHARACTERS, tuple: ITEM_CHARACTERS, dict: ITEM_CHARACTERS}
)
# A product of two such numbers takes some microseconds.
LARGEST_NUMBER_BITS = 1 << 16


class TakesLong(Exception):
    """It is more than should be done while others wait for this thread."""


class TemplateBudget:
    """Spent by the thread that made it.

    The clock is that of the thread, so a busy machine fails nobody. It costs a call of the system, and is not looked at
    before so much time has passed by another clock.
    """

    def __init__(self, seconds: float = math.inf, is_hurried: bool = False) -> None:
        """`is_hurried`: who runs out of time is told `TakesLong`, for a second try elsewhere."""
        self._seconds = seconds
        self._is_hurried = is_hurried
        self._end = time.thread_time() + seconds
        self._look_at = time.monotonic() + seconds
        self._num_characters = 0

    def tick(self) -> None:
        """One more turn of a loop, or call.

        Raises:
            PromptTooCostly, TakesLong: the time is spent.
        """
        if time.monotonic() >= self._look_at:
            left = self._end - time.thread_time()
            if left <= 0:
                raise self._out_of_time()
            self._look_at = time.monotonic() + left

    def ask(self, num_characters: float) -> None:
        """Something so large is to be built.

        Raises:
            PromptTooCostly: it is too large.
        """
        if num_characters > LARGEST_CHARACTERS:
            raise _too_large(LARGEST_CHARACTERS)

    def keep(self, value: Any) -> None:
        """Something has been built.

        Raises:
            PromptTooCostly: it is too large, or all of it together is.
        """
        weight = _WEIGHTS.get(type(value))
        if weight is None:
            return
        size = weight * len(value)
        if size > LARGEST_CHARACTERS:
            raise _too_large(LARGEST_CHARACTERS)
        self._num_characters += size
        if self._num_characters > MOST_CHARACTERS:
            raise _too_large(MOST_CHARACTERS)

    def _out_of_time(self) -> Exception:
        if self._is_hurried:
            return TakesLong()
        seconds = round(self._seconds, 2)
        return PromptTooCostly(
            f"the chat template has taken more than {seconds:g} s of CPU for these messages (--prompt-timeout): "
            "send fewer or shorter ones, or have the template mended",
            "messages",
        )


def _too_large(most: int) -> PromptTooCostly:
    return PromptTooCostly(
        f"the chat template builds texts of more than {most >> 20} Mi characters of these messages: send fewer or "
        "shorter ones, or have the template mended",
        "messages",
    )
