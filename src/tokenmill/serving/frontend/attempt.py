"""One attempt to prepare a message: its time limits, and a callback for its progress."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from tokenmill.serving.frontend.template_budget import TakesLong, TemplateBudget

# For so many bytes of messages a template has the same time once more.
BYTES_PER_BUDGET = 1 << 20
# What may be done while others wait: a template that ends runs for a hundredth of this, and a text of so many
# characters is encoded in as long.
HURRIED_SECONDS = 0.05
HURRIED_CHARACTERS = 1 << 16


def _nobody(did: str) -> None:
    """Ignore the progress of an attempt."""


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to prepare a message.

    Attributes:
        seconds: CPU seconds for the chat template, and as many again for each `BYTES_PER_BUDGET` of messages.
        is_hurried: other messages wait. Work that takes too long raises `TakesLong`, and is tried again elsewhere.
        note: called with each stage that begins, as a participle: "rendered".
    """

    seconds: float = math.inf
    is_hurried: bool = False
    note: Callable[[str], None] = _nobody

    def begin_rendering(self, num_bytes: int) -> TemplateBudget:
        """Note that rendering begins, and return the template's budget for `num_bytes` of messages."""
        self.note("rendered")
        seconds = self.seconds * (1 + num_bytes / BYTES_PER_BUDGET)
        return TemplateBudget(HURRIED_SECONDS, True) if self.is_hurried else TemplateBudget(seconds)

    def begin_encoding(self, num_characters: int) -> None:
        """Note that the encoding of a text of `num_characters` begins.

        Raises:
            TakesLong: the text is too long for a hurried attempt.
        """
        if self.is_hurried and num_characters > HURRIED_CHARACTERS:
            raise TakesLong
        self.note("tokenized")


ANY_TIME = Attempt()
