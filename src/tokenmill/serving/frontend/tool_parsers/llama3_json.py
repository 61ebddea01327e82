"""The notation of Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several of them after semicolons."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.serving.frontend.free_text import SPACE, FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.tool_parsers.hermes import call_events, json_call
from tokenmill.serving.frontend.tool_parsers.protocol import Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, CallScanner

TAG = "<|python_tag|>"
_NO_TAG = r" & ~/<\|python_tag\|>(?s:.*)/"
# Text that is no call at the beginning, and behind a call.
_NO_CALL = r"/[^{ \t\r\n](?s:.*)/" + _NO_TAG
_NO_FURTHER_CALL = r"/[^{; ,\t\r\n](?s:.*)/" + _NO_TAG
_SPACE_BETWEEN = r"/[ \t\r\n;,]{0,256}/"
_SPACES = " \t\r\n"
_BETWEEN = _SPACES + ";,"


class Llama3JsonNotation:
    """Llama 3's notation of calls."""

    needs_special_tokens = False
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> Llama3JsonParser:
        """Return a parser for one answer."""
        return Llama3JsonParser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of one JSON call, or of several after semicolons."""
        call = "(" + " | ".join(json_call(builder, tool, "parameters") for tool in tools) + ")"
        return f'{call} ("; " {call})*' if is_parallel else call

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of calls, then text; or of text alone. No text begins with `{`, where a call would be."""
        call = "(" + " | ".join(json_call(text.builder, tool, "parameters") for tool in tools) + ")"
        special = text.specials()
        # Any token is allowed where a call may begin, and in the text behind it, where `{` is text: no mark parts them.
        text.marks = None
        # Special tokens are left out of the text, so a call may stand behind some.
        before = f"({SPACE} {special})* {SPACE}" if special else SPACE
        between = f"({_SPACE_BETWEEN} {special})* {_SPACE_BETWEEN}" if special else _SPACE_BETWEEN
        first, later = text.lexeme(_NO_CALL), text.lexeme(_NO_FURTHER_CALL)
        rest = f"({special} {text.noise()})?" if special else ""
        return f"{before} ({call} ({between} {call})* {between} ({later} {rest})? | ({first} {rest})?)"


class Llama3JsonParser:
    """Reads calls in Llama 3's notation. After the first text that is not a call, everything is content."""

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False
        self._call: CallScanner | None = None
        self._has_begun = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return parts of calls, or content once the text is not a call."""
        events: list[Event] = []
        while text:
            if self._is_content:
                events.append(Content(text))
                break
            text = self._between(text) if self._call is None else self._in_call(self._call, text, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text, and a call that was not accepted, as content."""
        held = self._held
        if self._call is not None:
            held = "" if self._call.is_accepted else held + "".join(self._call.raw)
        return [Content(held)] if held else []

    def _between(self, text: str) -> str:
        """Find the next object, or its absence; hold back text that may still precede one."""
        text = self._held + text
        self._held = ""
        rest = text.lstrip(_BETWEEN if self._num_calls else _SPACES)
        if rest.startswith(TAG):
            rest = rest[len(TAG) :].lstrip(_SPACES)
        gap = len(text) - len(rest)
        if gap <= MAX_GAP and TAG.startswith(rest):
            self._held = text
            return ""
        if gap <= MAX_GAP and rest[0] == "{":
            self._call, self._has_begun = CallScanner(), False
            self._held = text[:gap]
        else:
            self._is_content = True
            rest = text
        return rest

    def _in_call(self, call: CallScanner, text: str, events: list[Event]) -> str:
        end = call.push(text)
        if call.is_accepted:
            self._held = ""
            events.extend(call_events(call, self._has_begun))
            self._has_begun = True
        if call.is_done or call.is_broken:
            self._call = None
            self._num_calls += call.is_accepted
            if not call.is_accepted:
                events.append(Content(self._held + "".join(call.raw)))
                self._held = ""
            self._is_content = call.is_broken
        return text[end:]
