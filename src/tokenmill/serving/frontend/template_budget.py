"""Limit one rendering of a chat template: CPU seconds of its thread, and the text that it builds."""

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
    """Raised when work takes longer than other messages should wait for this thread."""


class TemplateBudget:
    """The budget of one rendering; only the thread that made it may spend it.

    It counts the thread's own CPU time, so a busy machine fails no request. Reading that clock is a system call, made
    only once enough time has passed on a cheaper clock.
    """

    def __init__(self, seconds: float = math.inf, is_hurried: bool = False) -> None:
        """`is_hurried`: raise `TakesLong` when the time is spent, for a second try elsewhere."""
        self._seconds = seconds
        self._is_hurried = is_hurried
        self._end = time.thread_time() + seconds
        self._look_at = time.monotonic() + seconds
        self._num_characters = 0

    def tick(self) -> None:
        """Check the time at a turn of a loop or a call.

        Raises:
            PromptTooCostly, TakesLong: the time is spent.
        """
        if time.monotonic() >= self._look_at:
            left = self._end - time.thread_time()
            if left <= 0:
                raise self._out_of_time()
            self._look_at = time.monotonic() + left

    def ask(self, num_characters: float) -> None:
        """Check the size of a text before it is built.

        Raises:
            PromptTooCostly: the text is too large.
        """
        if num_characters > LARGEST_CHARACTERS:
            raise _too_large(LARGEST_CHARACTERS)

    def keep(self, value: Any) -> None:
        """Count a value that has been built.

        Raises:
            PromptTooCostly: the value is too large, or all values together are.
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
