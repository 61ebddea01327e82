"""The notation of LFM2: a pythonic list between tokens, `<|tool_call_start|>[get(city="Ulm")]<|tool_call_end|>`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.tool_parsers.protocol import CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.pythonic import PythonicNotation, PythonicParser
from tokenmill.serving.frontend.tool_parsers.scanners import MarkerFinder

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Notation:
    """LFM2's notation of calls."""

    needs_special_tokens = True
    writes_objects = False

    def parser(self, tools: Sequence[Tool] = ()) -> Lfm2Parser:
        """Return a parser for one answer."""
        return Lfm2Parser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of a pythonic list of calls between its tokens."""
        calls = PythonicNotation().rule(builder, tools, is_parallel)
        return f"({builder.marker(BEGIN)} {calls} {builder.marker(END)})"

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with pythonic lists between tokens."""
        calls = PythonicNotation().rule(text.builder, tools, is_parallel=True)
        return text.with_calls((BEGIN,), f"{calls} {text.closing(END)}")


class Lfm2Parser:
    """Reads calls in LFM2's notation."""

    def __init__(self) -> None:
        self._outside = MarkerFinder(BEGIN)
        self._ending = MarkerFinder(END)
        self._calls: PythonicParser | None = None
        self._opening = ""
        self._is_list = False

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside lists, and calls that are closed."""
        events: list[Event] = []
        while text:
            if self._calls is None:
                before, marker, text = self._outside.push(text)
                if before:
                    events.append(Content(before))
                if marker:
                    self._calls, self._opening = PythonicParser(), BEGIN
                    self._is_list = False
                continue
            before, marker, text = self._ending.push(text)
            self._take(self._calls.feed(before), events)
            if marker and self._calls.is_in_string:
                self._take(self._calls.feed(marker), events)
            elif marker:
                self._close(self._calls, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text and an unfinished list as content."""
        if self._calls is None:
            held = self._outside.finish()
            return [Content(held)] if held else []
        events: list[Event] = []
        self._take(self._calls.feed(self._ending.finish()), events)
        self._take(self._calls.finish(), events)
        if self._opening:
            events.append(Content(self._opening))
        return events

    def _take(self, inner: list[Event], events: list[Event]) -> None:
        """Add a list's events; the opening token is content if the list does not begin with a call."""
        for event in inner:
            if isinstance(event, CallBegins):
                self._opening, self._is_list = "", True
            elif self._opening and isinstance(event, Content):
                events.append(Content(self._opening))
                self._opening = ""
            events.append(event)

    def _close(self, calls: PythonicParser, events: list[Event]) -> None:
        self._take(calls.finish(), events)
        if not self._is_list:
            events.append(Content(self._opening + END))
        self._calls, self._opening = None, ""
