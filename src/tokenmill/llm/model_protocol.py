"""What `chat` and `complete` ask of a model, wherever it runs: answers as streams of deltas."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer; the last one says why it ended."""

    text: str
    finish_reason: str | None = None


Deltas = Generator[Delta, None, None]


class ModelAccess(Protocol):
    """Answers as streams of deltas. Closing a stream early stops the generation. `fields` are sampling parameters."""

    def chat(self, messages: Messages, fields: Mapping[str, Any]) -> Deltas:
        """The assistant's next message."""

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Deltas:
        """The continuation of a text."""
