"""The notation of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,days:2,tags:[<|"|>a<|"|>]}<tool_call|>`.

Keys have no quotes, and strings have a token for theirs. A call is returned as a whole when it is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenmill.core.json_text import whole_characters
from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.tool_parsers.gemma4_values import QUOTE, Gemma4Values
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import MarkerFinder, finite

BEGIN, END = "<|tool_call>", "<tool_call|>"
_CALL = re.compile(r"\s*call:([A-Za-z0-9_.\-]{1,64})\s*(?=\{)")
# A text, a bracket or a separator, a text as JSON has it, or a bare word; white space goes.
_TOKEN = re.compile(
    r'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{}\[\]:,])'
    r'|(?P<json>"(?:[^"\\]|\\.)*")|(?P<word>[^{}\[\]:,"<\s]+))\s*',
    re.DOTALL,
)
# What opens and what closes a string, by how the text goes on; an escape in JSON is read as a whole.
_NEXT = {"": (END, QUOTE, '"'), QUOTE: (QUOTE,), '"': ('"', "\\\\", '\\"')}
_NAMES = {"true": True, "false": False, "null": None, "None": None}
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_MAX_DEPTH, _MAX_CALL = 32, 1 << 16


class Gemma4Notation:
    """Gemma 4's notation of calls."""

    needs_special_tokens = True
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> Gemma4Parser:
        """Return a parser for one answer."""
        return Gemma4Parser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of calls between tokens."""
        values = Gemma4Values(builder)
        calls = " | ".join(f"({literal('call:' + tool.name)} {values.arguments(tool)})" for tool in tools)
        call = f"{builder.marker(BEGIN)} ({calls}) {builder.marker(END)}"
        return f"({call})+" if is_parallel else f"({call})"

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of text with calls between tokens."""
        values = Gemma4Values(text.builder)
        calls = " | ".join(f"{literal('call:' + tool.name)} {values.arguments(tool)}" for tool in tools)
        return text.with_calls((BEGIN,), f"({calls}) {text.closing(END)}")


class Gemma4Parser:
    """Reads calls in Gemma 4's notation."""

    def __init__(self) -> None:
        self._outside = MarkerFinder(BEGIN)
        self._inside = MarkerFinder(*_NEXT[""])
        self._quote = ""
        self._call: list[str] | None = None

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return content outside calls, and calls that are closed."""
        events: list[Event] = []
        while text:
            if self._call is None:
                before, marker, text = self._outside.push(text)
                if before:
                    events.append(Content(before))
                self._call = [] if marker else None
                continue
            before, marker, text = self._inside.push(text)
            self._call.append(before)
            if marker == END:
                events.extend(_call_events("".join(self._call)))
                self._call = None
            elif marker:
                self._call.append(marker)
                self._read_quote(marker)
        return events

    def _read_quote(self, marker: str) -> None:
        """Enter or leave a string, in which a mark is text."""
        if not self._quote or marker == self._quote:
            self._quote = "" if self._quote else marker
            self._inside = MarkerFinder(*_NEXT[self._quote])

    def finish(self) -> list[Event]:
        """End the text; return a call that was not closed as content."""
        if self._call is not None:
            return [Content(BEGIN + "".join(self._call) + self._inside.finish())]
        held = self._outside.finish()
        return [Content(held)] if held else []


def _call_events(source: str) -> list[Event]:
    head = _CALL.match(source)
    try:
        if head is None or len(source) > _MAX_CALL:
            raise ValueError("no call")
        written = json.dumps(_Reader(source, head.end()).whole(), ensure_ascii=False, allow_nan=False)
        arguments = whole_characters(written)
    except (ValueError, RecursionError):
        return [Content(BEGIN + source + END)]
    return [CallBegins(head[1]), CallArguments(arguments)]


class _Reader:
    """Reads one value; raises ValueError for invalid text."""

    def __init__(self, source: str, at: int) -> None:
        self._source = source
        self._at = at
        self._token: re.Match[str] | None = None
        self._advance()

    def whole(self) -> Any:
        """Return the value, which must be the whole text."""
        value = self._value(_MAX_DEPTH)
        if self._token is not None or self._at < len(self._source):
            raise ValueError("text after the arguments")
        return value

    def _advance(self) -> None:
        self._token = _TOKEN.match(self._source, self._at)
        self._at = self._token.end() if self._token is not None else self._at

    def _takes(self, mark: str) -> bool:
        found = self._token is not None and self._token["mark"] == mark
        if found:
            self._advance()
        return found

    def _value(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError("nested too deep")
        if self._takes("{"):
            items: dict[str, Any] = {}
            while not self._takes("}"):
                key = self._key()
                items[key] = self._value(depth - 1)
                self._separate("}")
            return items
        if self._takes("["):
            values: list[Any] = []
            while not self._takes("]"):
                values.append(self._value(depth - 1))
                self._separate("]")
            return values
        return self._leaf()

    def _separate(self, closing: str) -> None:
        if not self._takes(",") and not (self._token is not None and self._token["mark"] == closing):
            raise ValueError("no comma between two values")

    def _key(self) -> str:
        token = self._token
        word = None if token is None else token["word"]
        key = word if word is not None else self._text()
        if word is not None:
            self._advance()
        if not self._takes(":"):
            raise ValueError("no colon after a key")
        return key

    def _text(self) -> str:
        token = self._token
        if token is None or (token["text"] is None and token["json"] is None):
            raise ValueError("no text")
        self._advance()
        return token["text"] if token["text"] is not None else str(json.loads(token["json"]))

    def _leaf(self) -> Any:
        word = None if self._token is None else self._token["word"]
        if word is None:
            return self._text()
        self._advance()
        if word in _NAMES:
            return _NAMES[word]
        if not _NUMBER.fullmatch(word):
            raise ValueError("neither a number nor a name")
        return finite(json.loads(word))
