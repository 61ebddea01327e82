"""How one message is prepared: how long that may take, and who is told how far it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.serving.frontend.template_budget import TakesLong, TemplateBudget

# For so many bytes of messages a template has the same time once more.
BYTES_PER_BUDGET = 1 << 20
# What may be done while others wait: a template that ends runs for a hundredth of this, and a text of so many
# characters is encoded in as long.
HURRIED_SECONDS = 0.05
HURRIED_CHARACTERS = 1 << 16


def _nobody(did: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a message.

    Attributes:
        seconds: of CPU for the chat template, and as much again for each `BYTES_PER_BUDGET` of messages.
        is_hurried: others wait. What then takes too long raises `TakesLong`, and is tried again elsewhere.
        note: told what is begun, as a participle: "rendered".
    """

    seconds: float = math.inf
    is_hurried: bool = False
    note: Callable[[str], None] = _nobody

    def begin_rendering(self, num_bytes: int) -> TemplateBudget:
        """What a template may take for messages of so many bytes."""
        self.note("rendered")
        seconds = self.seconds * (1 + num_bytes / BYTES_PER_BUDGET)
        return TemplateBudget(HURRIED_SECONDS, True) if self.is_hurried else TemplateBudget(seconds)

    def begin_encoding(self, num_characters: int) -> None:
        """A text of so many characters is to be encoded.

        Raises:
            TakesLong: it is too long to do it in a hurry.
        """
        if self.is_hurried and num_characters > HURRIED_CHARACTERS:
            raise TakesLong
        self.note("tokenized")


ANY_TIME = Attempt()
