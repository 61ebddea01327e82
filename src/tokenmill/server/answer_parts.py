"""An answer as a list of parts, for the APIs that reply with one: thoughts, texts and tool calls, in their order."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from tokenmill.frontend.answer import AnswerPart


class PartKind(Enum):
    """What a part is."""

    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """One part. `text` is its text so far, of a call the JSON of its arguments.

    Attributes:
        id: of a call: made here, for the client to name in its answer to it.
        name: of a call: the function.
    """

    kind: PartKind
    index: int
    id: str
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PartBegins:
    """A new part; the one before it has ended."""

    part: Part


@dataclass(frozen=True, slots=True)
class PartGrows:
    """More of the latest part."""

    part: Part
    delta: str


@dataclass(frozen=True, slots=True)
class PartEnds:
    """A part is complete."""

    part: Part


Change = PartBegins | PartGrows | PartEnds


class AnswerParts:
    """Puts parts together as events come."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """True if the model calls a tool."""
        return any(part.kind is PartKind.CALL for part in self.parts)

    def take(self, answer: Iterable[AnswerPart]) -> Iterator[Change]:
        """Take in what a delta brought; yields what it changes."""
        for brought in answer:
            if brought.reasoning:
                yield from self._grow(PartKind.THOUGHT, brought.reasoning)
            if brought.content:
                yield from self._grow(PartKind.TEXT, brought.content)
            for call in brought.calls:
                if call.name is not None:
                    yield from self._begin(PartKind.CALL, call.name)
                if call.arguments:
                    yield from self._grow(PartKind.CALL, call.arguments)

    def finish(self) -> Iterator[Change]:
        """The answer has ended. One without any part has an empty text."""
        if not self.parts:
            yield from self._begin(PartKind.TEXT)
        if self._is_open:
            self._is_open = False
            yield PartEnds(self.parts[-1])

    def _grow(self, kind: PartKind, text: str) -> Iterator[Change]:
        if not self._is_open or self.parts[-1].kind is not kind:
            yield from self._begin(kind)
        part = self.parts[-1]
        part.text += text
        yield PartGrows(part, text)

    def _begin(self, kind: PartKind, name: str = "") -> Iterator[Change]:
        if self._is_open:
            yield PartEnds(self.parts[-1])
        self._is_open = True
        self.parts.append(Part(kind, len(self.parts), secrets.token_hex(12), name))
        yield PartBegins(self.parts[-1])
