"""The interfaces of notations and parsers of tool calls, and the events that parsers return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder


class Content(msgspec.Struct, frozen=True):
    """Text outside all calls."""

    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """The beginning of a call of this function; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A further part of the latest call's arguments: JSON, as far as the model writes it correctly."""

    text: str


Event = Content | CallBegins | CallArguments


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called, with the JSON schema of its arguments; see `GrammarBuilder.arguments`.

    Attributes:
        is_strict: inner objects are closed. is_loose: the arguments may be any object where the model decides to call.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False
    is_loose: bool = False

    def loosened(self) -> Tool:
        """Return the tool with any object as its arguments, if its caller asks for no more than that."""
        return Tool(self.name, {"additionalProperties": True}) if self.is_loose else self


def read_tool(tool: dict[str, Any]) -> Tool:
    """Read a tool of OpenAI's form, which the edge has checked."""
    function = tool["function"]
    strict = function.get("strict")
    return Tool(function["name"], function.get("parameters") or {}, strict is True, strict is False)


class ToolParser(Protocol):
    """Reads the calls in one answer."""

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return the events that are certain by now."""
        ...

    def finish(self) -> list[Event]:
        """End the text; return what was held back as content, unless it belongs to a call that has begun."""
        ...


class Notation(Protocol):
    """A family of models' notation of calls.

    Attributes:
        needs_special_tokens: its markers are special tokens, which must stay in the text.
        writes_objects: the arguments are written as one object, so that any object can be.
    """

    needs_special_tokens: bool
    writes_objects: bool

    def parser(self, tools: Sequence[Tool] = ()) -> ToolParser:
        """Return a parser for one answer, which may call these tools."""
        ...

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the grammar rule of one call of these tools, or of several."""
        ...

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule, within `text`, of an answer that may call these tools and is free otherwise."""
        ...
