"""Notations that are a marker and a JSON list: `<|tool_call|>[{"name": ..., "arguments": {...}}]`, text around it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.serving.frontend.free_text import GAP, FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.tool_parsers.hermes import call_events, json_call
from tokenmill.serving.frontend.tool_parsers.protocol import Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, CallScanner, MarkerFinder

_BETWEEN = " \t\r\n,"


class JsonListNotation(msgspec.Struct, frozen=True):
    """A notation of calls as a JSON list after a marker.

    Attributes:
        markers: texts that may stand before a list; a grammar uses the first.
        end: text that may stand after a list; "": none.
    """

    markers: tuple[str, ...]
    end: str = ""
    needs_special_tokens = True
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> JsonListParser:
        """Return a parser for one answer."""
        return JsonListParser(self)

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of a list of calls between the first marker and the end."""
        call = "(" + " | ".join(json_call(builder, tool, "arguments") for tool in tools) + ")"
        calls = f'{call} (", " {call})*' if is_parallel else call
        end = builder.marker(self.end) if self.end else ""
        return f'({builder.marker(self.markers[0])} "[" {calls} "]" {end})'

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with lists of calls; the text after one begins with its end, if it has any."""
        call = "(" + " | ".join(json_call(text.builder, tool, "arguments") for tool in tools) + ")"
        return text.with_calls(self.markers, f'{GAP} "[" {call} (/, ?/ {call})* "]"')


class JsonListParser:
    """Reads JSON lists of calls. Text before the first call of a list is held back until the call is accepted."""

    def __init__(self, notation: JsonListNotation) -> None:
        self._end = notation.end
        ends = (notation.end,) if notation.end else ()
        self._outside = MarkerFinder(*notation.markers, *ends)
        self._read = self._read_content
        self._call = CallScanner()
        self._has_begun = False
        self._may_end = False
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside lists, and parts of calls as they come."""
        events: list[Event] = []
        while text:
            text = self._read(text, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text, and a call that was not accepted, as content."""
        held = self._held + self._outside.finish()
        if self._read == self._read_object and not self._call.is_accepted:
            held += "".join(self._call.raw)
        return [Content(held)] if held else []

    def _read_content(self, text: str, events: list[Event]) -> str:
        before, marker, rest = self._outside.push(text)
        if before:
            events.append(Content(before))
            self._may_end = self._may_end and not before.strip()
        if marker == self._end and marker:
            if not self._may_end:
                events.append(Content(marker))
            self._may_end = False
        elif marker:
            self._read, self._held = self._read_head, marker
        return rest

    def _read_head(self, text: str, events: list[Event]) -> str:
        """Read white space and `[` after the marker."""
        rest = text.lstrip()
        self._held += text[: len(text) - len(rest)]
        if rest.startswith("[") and len(self._held) <= MAX_GAP:
            self._read = self._read_list
            self._held += "["
            return rest[1:]
        if rest or len(self._held) > MAX_GAP:
            self._end_list(events)
        return rest

    def _read_list(self, text: str, events: list[Event]) -> str:
        rest = text.lstrip(_BETWEEN)
        if self._held:
            self._held += text[: len(text) - len(rest)]
        if len(self._held) > MAX_GAP:
            self._end_list(events)
        elif rest.startswith("{"):
            self._call, self._has_begun = CallScanner(), False
            self._read = self._read_object
        elif rest.startswith("]") and not self._held:
            self._may_end = True
            self._end_list(events)
            return rest[1:]
        elif rest:
            self._end_list(events)
        return rest

    def _read_object(self, text: str, events: list[Event]) -> str:
        end = self._call.push(text)
        if self._call.is_accepted:
            self._held = ""
            events.extend(call_events(self._call, self._has_begun))
            self._has_begun = True
        if self._call.is_broken:
            if not self._call.is_accepted:
                self._held += "".join(self._call.raw)
            self._end_list(events)
        elif self._call.is_done:
            self._read = self._read_list
        return text[end:]

    def _end_list(self, events: list[Event]) -> None:
        """End a list; held back text is content after all."""
        if self._held:
            events.append(Content(self._held))
        self._read, self._held = self._read_content, ""
