"""What a parser of tool calls is, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.serving.frontend.grammar_builder import GrammarBuilder


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of this function; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the arguments of the latest call: JSON, as far as the model has it right."""

    text: str


Event = Content | CallBegins | CallArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, with the JSON schema of its arguments; see `GrammarBuilder.arguments`."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


def read_tool(tool: dict[str, Any]) -> Tool:
    """A tool of OpenAI's form, which the edge has checked."""
    function = tool["function"]
    return Tool(function["name"], function.get("parameters") or {}, function.get("strict") is True)


class ToolParser(Protocol):
    """Reads the calls in one answer."""

    def feed(self, text: str) -> list[Event]:
        """Take in a delta."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: what was held back is content, unless it is a call that has begun."""
        ...


class Notation(Protocol):
    """How a family of models writes calls.

    Attributes:
        needs_special_tokens: its markers are special tokens, which must not be left out of the text.
    """

    needs_special_tokens: bool

    def parser(self, tools: Sequence[Tool] = ()) -> ToolParser:
        """A parser for one answer, which may call these tools."""
        ...

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """The grammar rule of one call of these tools, or of several."""
        ...
