"""Follow free text between calls without asking a matcher: only tokens that may open something matter there.

    in text    no mark is complete, and the text's end begins none    any token is allowed, no matcher need hear of it
    stirred    a mark is complete, or the text's end may begin one    the matcher takes in what follows, and is asked

A grammar that says its marks promises that free text is the same state after any tokens that stir nothing. Whether a
matcher is back in free text after a call is for its reader to find out: it takes the end, and its mask has all tokens.
Does not know what the marks open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class Openings:
    """The marks of a grammar, for one vocabulary.

    Attributes:
        stirs: by token id, whether it stirs a text whose end begins no mark.
    """

    def __init__(self, marks: Sequence[str], text_of: Callable[[int], bytes], vocab_size: int) -> None:
        self._marks = [mark.encode() for mark in marks]
        self._text_of = text_of
        self._longest = max(map(len, self._marks), default=1)
        self.stirs = bytes(self.tail(b"", token_id) != b"" for token_id in range(vocab_size))

    def tail(self, tail: bytes, token_id: int) -> bytes | None:
        """Return the end of a text that begins a mark, after one more token; None: a mark is complete.

        Args:
            tail: the same before that token.
        """
        text = tail + self._text_of(token_id)
        if any(mark in text for mark in self._marks):
            return None
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[-length:]) for mark in self._marks):
                return text[-length:]
        return b""


class LazyTemplate(msgspec.Struct, frozen=True):
    """A compiled grammar that begins in free text or comes to it, to be deep-copied like any other."""

    matcher: Any
    openings: Openings
    begins_free: bool

    def deep_copy(self) -> Any:
        """Return a matcher at the start."""
        return self.matcher.deep_copy()
