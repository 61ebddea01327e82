"""The notation of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any text around it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.serving.frontend.free_text import GAP, FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import CallScanner, MarkerFinder

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesNotation:
    """The notation of calls of Hermes and Qwen."""

    needs_special_tokens = False
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> HermesParser:
        """Return a parser for one answer."""
        return HermesParser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of calls between tags."""
        calls = " | ".join(json_call(builder, tool, "arguments") for tool in tools)
        call = f'{builder.marker(BEGIN)} "\\n" ({calls}) "\\n" {builder.marker(END)}'
        return f'({call}) ("\\n" {call})*' if is_parallel else f"({call})"

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with calls between tags, with line breaks or without."""
        calls = " | ".join(json_call(text.builder, tool, "arguments") for tool in tools)
        return text.with_calls((BEGIN,), f"{GAP} ({calls}) {GAP} {text.closing(END)}")


def json_call(builder: GrammarBuilder, tool: Tool, arguments_key: str) -> str:
    """Return the rule of a call as a JSON object."""
    head = literal('{"name": ' + literal(tool.name) + f', "{arguments_key}": ')
    return f'({head} {builder.arguments(tool.parameters, tool.is_strict)} "}}")'


class HermesParser:
    """Reads calls in the notation of Hermes and Qwen."""

    def __init__(self) -> None:
        self._outside = MarkerFinder(BEGIN)
        self._closing = MarkerFinder(END, BEGIN)
        self._is_closing = False
        self._call: CallScanner | None = None
        self._has_begun = False

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside calls, and parts of calls as they come."""
        events: list[Event] = []
        while text:
            if self._call is not None:
                text = self._in_call(self._call, text, events)
                continue
            finder = self._closing if self._is_closing else self._outside
            before, marker, text = finder.push(text)
            if before and not self._is_closing:
                events.append(Content(before))
            if marker:
                self._is_closing = False
                if marker == BEGIN:
                    self._call, self._has_begun = CallScanner(), False
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text, and a call that was not accepted, as content."""
        if self._call is not None and not self._call.is_accepted:
            return [Content(BEGIN + "".join(self._call.raw))]
        held = "" if self._is_closing or self._call is not None else self._outside.finish()
        return [Content(held)] if held else []

    def _in_call(self, call: CallScanner, text: str, events: list[Event]) -> str:
        """Read on in a call; return the text after it."""
        end = call.push(text)
        if call.is_accepted:
            events.extend(call_events(call, self._has_begun))
            self._has_begun = True
        if call.is_done or call.is_broken:
            self._call = None
            self._is_closing = call.is_accepted
            if not call.is_accepted:
                events.append(Content(BEGIN + "".join(call.raw)))
        return text[end:]


def call_events(call: CallScanner, has_begun: bool) -> list[Event]:
    """Return the events of an accepted call since the last time."""
    events: list[Event] = []
    if not has_begun:
        assert call.name is not None, "an accepted call has a name"
        events.append(CallBegins(call.name))
    if arguments := call.take_arguments():
        events.append(CallArguments(arguments))
    return events
