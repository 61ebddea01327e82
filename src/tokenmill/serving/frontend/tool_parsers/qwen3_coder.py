"""The notation of Qwen3-Coder and Qwen3.5: tags around a call and its arguments, whose values are plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Ulm
    </parameter>
    </function>
    </tool_call>

The function's schema says which values are strings and which are JSON. Strings stream; JSON is returned when complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenmill.core.json_text import whole_characters
from tokenmill.serving.frontend.free_text import GAP, FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.json_schema import closed
from tokenmill.serving.frontend.tool_parsers.named_arguments import named_arguments
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, JsonStrings, MarkerFinder
from tokenmill.serving.frontend.tool_parsers.text_values import is_text, kinds_of, text_rule

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DEFINITIONS = ("$defs", "definitions")
# As Python writes them: the template of Qwen3.5 does so too.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderNotation:
    """The notation of calls of Qwen3-Coder and Qwen3.5."""

    needs_special_tokens = False
    writes_objects = False

    def parser(self, tools: Sequence[Tool] = ()) -> Qwen3CoderParser:
        """Return a parser for one answer, which takes the types of arguments from these tools."""
        return Qwen3CoderParser(tools)

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of tagged calls; see `text_values` for what is enforced of a text."""
        calls = " | ".join(_call_rule(builder, tool) for tool in tools)
        call = f'{builder.marker(BEGIN)} "\\n" ({calls}) {literal(_FUNCTION_END)} "\\n" {builder.marker(END)}'
        return f'({call}) ("\\n" {call})*' if is_parallel else f"({call})"

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with tagged calls."""
        calls = " | ".join(_call_rule(text.builder, tool) for tool in tools)
        return text.with_calls((BEGIN,), f"{GAP} ({calls}) {literal(_FUNCTION_END)} {GAP} {text.closing(END)}")


def _call_rule(builder: GrammarBuilder, tool: Tool) -> str:
    """Return the rule of a call: parameters in schema order; optional ones may be left out."""
    tool = Tool(tool.name, closed(tool.parameters, tool.is_strict), tool.is_strict)
    required = tool.parameters.get("required")
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    rules = [literal(f"{_FUNCTION}{tool.name}>\n")]
    for name, schema in named_arguments(tool, lambda name: ">" not in name and "\n" not in name).items():
        head = literal(f"{_PARAMETER}{name}>\n")
        value = _value_rule(builder, tool, schema if isinstance(schema, dict) else {}, definitions)
        is_required = isinstance(required, list) and name in required
        rules.append(f'({head} {value} "\\n")' + ("" if is_required else "?"))
    return f"({' '.join(rules)})"


def _value_rule(builder: GrammarBuilder, tool: Tool, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if is_text(schema):
        return text_rule(builder, tool, schema, _PARAMETER_END)
    return f"{builder.value({**definitions, **schema}, tool.is_strict)} {literal(chr(10) + _PARAMETER_END)}"


class Qwen3CoderParser:
    """Reads calls in the notation of Qwen3-Coder and Qwen3.5."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._properties = {tool.name: tool.parameters.get("properties") or {} for tool in tools}
        self._read = self._read_content
        self._finder = MarkerFinder(BEGIN)
        self._held = ""
        self._parts: list[str] = []
        self._known: dict[str, Any] = {}
        self._kinds: frozenset[str] = frozenset()
        self._strings = JsonStrings()
        self._is_first = True
        self._is_at_start = False
        self._holds_line_end = False

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside calls, and parts of calls as they come."""
        events: list[Event] = []
        while text:
            text = self._read(text, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text as content."""
        held = self._held
        if self._read == self._read_content:
            held = self._finder.finish()
        return [Content(held)] if held else []

    def _read_content(self, text: str, events: list[Event]) -> str:
        before, marker, rest = self._finder.push(text)
        if before:
            events.append(Content(before))
        if marker:
            self._read, self._held = self._read_head, BEGIN
        return rest

    def _read_head(self, text: str, events: list[Event]) -> str:
        """Read white space and the tag with the function's name after the marker."""
        for at, character in enumerate(text):
            head = (self._held + character)[len(BEGIN) :].lstrip()
            name = head[len(_FUNCTION) : -1] if head.endswith(">") else head[len(_FUNCTION) :]
            is_near = len(self._held) < MAX_GAP
            may_be = _FUNCTION.startswith(head) or (head.startswith(_FUNCTION) and _NAME.fullmatch(name))
            if not is_near or not may_be:
                events.append(Content(self._held))
                self._held = ""
                self._enter(self._read_content, BEGIN)
                return text[at:]
            self._held += character
            if head.endswith(">"):
                self._held = ""
                self._begin_call(name, events)
                return text[at + 1 :]
        return ""

    def _begin_call(self, name: str, events: list[Event]) -> None:
        events += [CallBegins(name), CallArguments("{")]
        self._known, self._is_first = self._properties.get(name, {}), True
        self._enter(self._read_between, _PARAMETER, _FUNCTION_END, END)

    def _enter(self, read: Any, *markers: str) -> None:
        self._read, self._finder = read, MarkerFinder(*markers)

    def _read_between(self, text: str, events: list[Event]) -> str:
        """Find the next parameter or the end of the call; drop other text."""
        _, marker, rest = self._finder.push(text)
        if marker == _PARAMETER:
            self._enter(self._read_key, ">")
        elif marker:
            events.append(CallArguments("}"))
            markers = (BEGIN,) if marker == END else (END, BEGIN)
            self._enter(self._read_content if marker == END else self._read_end, *markers)
        return rest

    def _read_end(self, text: str, events: list[Event]) -> str:
        """Drop the text between the end of the function and the end of the call."""
        _, marker, rest = self._finder.push(text)
        if marker:
            self._enter(self._read_content, BEGIN)
        if marker == BEGIN:
            self._read, self._held = self._read_head, BEGIN
        return rest

    def _read_key(self, text: str, events: list[Event]) -> str:
        before, marker, rest = self._finder.push(text)
        self._parts.append(before)
        if marker:
            key = "".join(self._parts)
            self._parts.clear()
            self._kinds = kinds_of(self._known[key]) if key in self._known else frozenset(["string"])
            comma = "" if self._is_first else ", "
            opening = '"' if self._is_text else ""
            events.append(CallArguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {opening}"))
            self._is_first, self._is_at_start, self._holds_line_end = False, True, False
            self._strings = JsonStrings()
            self._enter(self._read_value, _PARAMETER_END)
        return rest

    @property
    def _is_text(self) -> bool:
        return self._kinds == {"string"}

    def _read_value(self, text: str, events: list[Event]) -> str:
        before, marker, rest = self._finder.push(text)
        if "string" not in self._kinds and self._strings.push(before) and marker:
            self._strings.push(marker)
            before, marker = before + marker, ""
        shown = self._without_outer_lines(before)
        if self._is_text:
            if shown:
                events.append(CallArguments(json.dumps(shown, ensure_ascii=False)[1:-1]))
        else:
            self._parts.append(shown)
        if marker:
            events.append(CallArguments('"' if self._is_text else _json_value("".join(self._parts), self._kinds)))
            self._parts.clear()
            self._enter(self._read_between, _PARAMETER, _FUNCTION_END, END)
        return rest

    def _without_outer_lines(self, text: str) -> str:
        """Strip the line breaks next to a value's tags; hold back one that may be the last character."""
        if not text:
            return ""
        if self._is_at_start:
            self._is_at_start = False
            text = text.removeprefix("\n")
            if not text:
                return ""
        text = "\n" + text if self._holds_line_end else text
        self._holds_line_end = text.endswith("\n")
        return text.removesuffix("\n")


def _json_value(text: str, kinds: frozenset[str]) -> str:
    """Return the value of a parameter that is not only a string as JSON; text that is not JSON becomes a string."""
    value = text.strip()
    value = _PYTHON_NAMES.get(value, value)
    if "string" not in kinds or (value == "null" and "null" in kinds):
        try:
            return whole_characters(json.dumps(json.loads(value, parse_constant=_no_number), ensure_ascii=False))
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
