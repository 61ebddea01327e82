"""The notations of Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.tool_parsers.hermes import call_events, json_call
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, CallScanner, MarkerFinder, ValueScanner

BEGIN, ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}(?:\[CALL_ID\][A-Za-z0-9]*)?")


class MistralNotation:
    """Mistral's notations of calls."""

    needs_special_tokens = True
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> MistralParser:
        """Return a parser for one answer."""
        return MistralParser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of a marker and a JSON list of calls."""
        call = "(" + " | ".join(json_call(builder, tool, "arguments") for tool in tools) + ")"
        calls = f'{call} (", " {call})*' if is_parallel else call
        return f'{builder.marker(BEGIN)} /[ ]?/ "[" {calls} "]"'

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with lists of calls, and with single calls where the vocabulary has their marks."""
        builder = text.builder
        call = "(" + " | ".join(json_call(builder, tool, "arguments") for tool in tools) + ")"
        listed = f'/[ ]?/ "[" {call} (/, ?/ {call})* "]"'
        if builder.vocabulary.token_id(ARGUMENTS) is None:
            return text.with_calls((BEGIN,), listed)
        has_ids = builder.vocabulary.token_id(_CALL_ID) is not None
        mark = (f"({builder.marker(_CALL_ID)} /[A-Za-z0-9]{{1,32}}/)? " if has_ids else "") + builder.marker(ARGUMENTS)
        single = " | ".join(
            f"{literal(tool.name)} {mark} {builder.arguments(tool.parameters, tool.is_strict)}" for tool in tools
        )
        return text.with_calls((BEGIN,), f"{listed} | /[ ]?/ ({single})")


class MistralParser:
    """Reads calls in both of Mistral's notations."""

    def __init__(self) -> None:
        self._outside = MarkerFinder(BEGIN)
        self._read = self._read_content
        self._call = CallScanner()
        self._value = ValueScanner()
        self._has_begun = False
        self._head = ""

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside calls, and parts of calls as they come."""
        events: list[Event] = []
        while text:
            text = self._read(text, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text, and a call that was not accepted, as content."""
        held = self._outside.finish()
        if self._read == self._read_head:
            held = BEGIN + self._head
        elif self._read == self._read_object and not self._call.is_accepted:
            held = "".join(self._call.raw)
        return [Content(held)] if held else []

    def _read_content(self, text: str, events: list[Event]) -> str:
        before, marker, rest = self._outside.push(text)
        if before:
            events.append(Content(before))
        if marker:
            self._read, self._head = self._read_head, ""
        return rest

    def _read_head(self, text: str, events: list[Event]) -> str:
        """Read on after the marker: `[` begins a list of objects; a name with `[ARGS]` or `{` begins a single call."""
        for at, character in enumerate(text, 1):
            self._head += character
            head = self._head.lstrip()
            if head == "[":
                self._read = self._read_list
                return text[at:]
            if character == "{" or head.endswith(ARGUMENTS):
                return self._begin_call(text, at, events)
            if len(self._head) > MAX_GAP or "\n" in head:
                self._end_head(events)
                return text[at:]
        return ""

    def _begin_call(self, text: str, at: int, events: list[Event]) -> str:
        """End the head in `text[:at]`, at `{` or `[ARGS]`, and begin a call if a name stands before it."""
        separator = ARGUMENTS if self._head.endswith(ARGUMENTS) else "{"
        name = self._head[: -len(separator)].strip()
        if not _NAME.fullmatch(name):
            self._end_head(events)
            return text[at:]
        events.append(CallBegins(name.partition("[CALL_ID]")[0]))
        self._value = ValueScanner()
        self._read = self._read_arguments
        return text[at:] if separator == ARGUMENTS else text[at - 1 :]

    def _end_head(self, events: list[Event]) -> None:
        events.append(Content(BEGIN + self._head))
        self._read = self._read_content

    def _read_arguments(self, text: str, events: list[Event]) -> str:
        end = self._value.push(text, 0)
        if end:
            events.append(CallArguments(text[:end]))
        if self._value.is_done:
            self._read = self._read_content
        return text[end:]

    def _read_list(self, text: str, events: list[Event]) -> str:
        rest = text.lstrip(" \t\r\n,")
        if rest.startswith("{"):
            self._call, self._has_begun = CallScanner(), False
            self._read = self._read_object
        elif rest:
            self._read = self._read_content
            rest = rest[1:] if rest[0] == "]" else rest
        return rest

    def _read_object(self, text: str, events: list[Event]) -> str:
        end = self._call.push(text)
        if self._call.is_accepted:
            events.extend(call_events(self._call, self._has_begun))
            self._has_begun = True
        if self._call.is_done or self._call.is_broken:
            self._read = self._read_content if self._call.is_broken else self._read_list
            if not self._call.is_accepted:
                events.append(Content("".join(self._call.raw)))
        return text[end:]
