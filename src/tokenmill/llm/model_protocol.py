"""Define what `chat` and `complete` need from a model, wherever it runs: answers as streams of deltas."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

import msgspec

Messages = list[dict[str, str]]


class PromptProgress(msgspec.Struct, frozen=True):
    """The tokens of a prompt that are computed, of how many, and an estimate of the seconds left, if there is one."""

    num_computed: int
    num_tokens: int
    seconds_left: float | None


class Delta(msgspec.Struct, frozen=True):
    """A piece of an answer; the last one has its finish reason. Before the first, some may have a `progress` only."""

    text: str
    finish_reason: str | None = None
    progress: PromptProgress | None = None


Deltas = Generator[Delta, None, None]


class ModelAccess(Protocol):
    """A model that answers in streams of deltas; closing a stream stops it. `fields` are sampling parameters."""

    def chat(self, messages: Messages, fields: Mapping[str, Any]) -> Deltas:
        """Stream the assistant's next message."""

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Deltas:
        """Stream the continuation of a text."""
