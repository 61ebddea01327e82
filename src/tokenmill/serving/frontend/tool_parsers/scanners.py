"""Scanners that find the end of a marker, a JSON value or a JSON call in text that comes in pieces."""

from __future__ import annotations

import json
import math
import sys

from tokenmill.core.json_text import whole_characters

_WHITESPACE = " \t\r\n"
# White space that may stand where a call could begin; what has more is content.
MAX_GAP = 256
_ARGUMENT_KEYS = ("arguments", "parameters")


class MarkerFinder:
    """Finds the first of several markers; holds back text that may become one."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._longest = max(map(len, markers))
        self._held = ""

    def push(self, text: str) -> tuple[str, str, str]:
        """Add text; return the text before the first marker, the marker or "", and the text after it."""
        text = self._held + text
        found = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        keep = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        # A marker may stand within one that begins before it.
        if found and min(found)[0] <= len(text) - keep:
            at, marker = min(found)
            self._held = ""
            return text[:at], marker, text[at + len(marker) :]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], "", ""

    def finish(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(marker.startswith(text) and marker != text for marker in self._markers)


class ValueScanner:
    """Finds the end of one JSON value. It knows strings and brackets; it does not check the text between them."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escapes = False
        self._is_scalar = False

    def push(self, text: str, start: int) -> int:
        """Read on from `start`; return where the value ends in `text`, or its length if it does not."""
        for at in range(start, len(text)):
            character = text[at]
            if self._in_string:
                self._read_string(character)
            elif self._is_scalar:
                if character in ",}];" or character in _WHITESPACE:
                    self.is_done = True
                    return at
                continue
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            elif character == "<" and self._depth:
                # Nothing in JSON: the model has closed the call without closing the value.
                self.is_done = True
                return at
            elif self._depth == 0:
                self._is_scalar = character not in _WHITESPACE
                continue
            if self._depth <= 0 and not self._in_string:
                self.is_done = True
                return at + 1
        return len(text)

    def _read_string(self, character: str) -> None:
        if self._escapes:
            self._escapes = False
        elif character == "\\":
            self._escapes = True
        elif character == '"':
            self._in_string = False


class JsonStrings:
    """Knows whether text that is meant to be JSON ends within a string, which no line break does."""

    def __init__(self) -> None:
        self._is_inside = False
        self._escapes = False

    def push(self, text: str) -> bool:
        """Read on; return True if the text so far ends within a string."""
        for character in text:
            if self._escapes:
                self._escapes = False
            elif character == "\\":
                self._escapes = self._is_inside
            elif character == '"' or (character == "\n" and self._is_inside):
                self._is_inside = not self._is_inside
        return self._is_inside


class CallScanner:
    """Reads a call written as `{"name": ..., "arguments": {...}}`, with its keys in any order and other keys allowed.

    Attributes:
        name: the function's name, once known.
        is_accepted: the object is a call: its name is known, and its arguments have begun, or it is closed without any.
        is_done: the object is closed.
        is_broken: the text is not such an object, or no longer is.
        raw: the text read until the call is accepted.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_accepted = False
        self.is_done = False
        self.is_broken = False
        self.raw: list[str] = []
        self._expects = "{"
        self._key = ""
        self._value: list[str] = []
        self._in_value = False
        self._scanner = ValueScanner()
        self._arguments: list[str] = []
        self._has_arguments = False
        self._is_arguments = False
        self._streams = False

    def push(self, text: str, start: int = 0) -> int:
        """Read on; return where the object ends or breaks in `text`, or its length if it does neither."""
        at = start
        while at < len(text) and not (self.is_done or self.is_broken):
            at = self._value_part(text, at) if self._in_value else self._step(text, at)
        if not self.is_accepted:
            self.raw.append(text[start:at])
        return at

    def take_arguments(self) -> str:
        """Return the arguments that have come since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _step(self, text: str, at: int) -> int:
        """Read one character between values."""
        character = text[at]
        if character in _WHITESPACE:
            return at + 1
        if self._expects == "value" or (self._expects in ("key", "key or }") and character == '"'):
            self._begin_value(character)
            return self._value_part(text, at)
        if character == "}" and self._expects in ("key or }", ", or }"):
            self._close()
        elif character == self._expects or (character == "," and self._expects == ", or }"):
            self._expects = {"{": "key or }", ":": "value", ",": "key"}[character]
        else:
            self.is_broken = True
            return at
        return at + 1

    def _begin_value(self, character: str) -> None:
        self._expects = "value" if self._expects == "value" else "key"
        self._is_arguments = self._expects == "value" and self._key in _ARGUMENT_KEYS and not self._has_arguments
        self._streams = self._is_arguments and character == "{"
        self._has_arguments |= self._streams
        self._accept()
        self._scanner = ValueScanner()
        self._value.clear()
        self._in_value = True

    def _value_part(self, text: str, at: int) -> int:
        end = self._scanner.push(text, at)
        (self._arguments if self._streams else self._value).append(text[at:end])
        if self._scanner.is_done:
            self._in_value = False
            self._end_value("".join(self._value))
            self._accept()
        return end

    def _end_value(self, value: str) -> None:
        if self._expects == "key":
            self._key = _string(value) or ""
            self._expects = ":"
            return
        self._expects = ", or }"
        if self._key == "name" and self.name is None:
            self.name = _string(value) or None
            self.is_broken = self.name is None
        elif self._is_arguments and not self._streams:
            # Some models write the arguments as a string that holds JSON; none at all may be null.
            inner = "{}" if value == "null" else _string(value)
            self.is_broken = inner is None
            self._has_arguments = inner is not None
            self._arguments.append(inner or "")

    def _close(self) -> None:
        self.is_done = True
        self.is_broken = self.name is None
        if not self._has_arguments and not self.is_broken:
            self._has_arguments = True
            self._arguments.append("{}")
        self._accept()

    def _accept(self) -> None:
        self.is_accepted |= self.name is not None and self._has_arguments


def finite(number: float) -> float:
    """Return a number, and the largest one of JSON's usual readers for one that they take for infinite."""
    return math.copysign(sys.float_info.max, number) if isinstance(number, float) and math.isinf(number) else number


def _string(value: str) -> str | None:
    try:
        decoded = json.loads(value)
    except ValueError:
        return None
    return whole_characters(decoded) if isinstance(decoded, str) else None
