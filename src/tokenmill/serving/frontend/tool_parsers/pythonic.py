"""The pythonic notation: the answer is a list of calls, `[get(city="Ulm", days=2), stop()]`, arguments by name.

A call is returned as a whole when it is closed: its literals become JSON. Nothing is evaluated; `ast` only parses.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

from tokenmill.core.json_text import whole_characters
from tokenmill.serving.frontend.free_text import SPACE, FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.json_schema import closed
from tokenmill.serving.frontend.tool_parsers.named_arguments import named_arguments
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, Tool
from tokenmill.serving.frontend.tool_parsers.scanners import finite

# What may still become the beginning of a list of calls: `[`, a name with dots or dashes, `(`.
_SPACE = r"[ \t\r\n]"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}"
_BEGINNING = re.compile(rf"{_SPACE}{{0,256}}(\[{_SPACE}{{0,16}}({_NAME}{_SPACE}{{0,16}}(\()?)?)?")
# The same for grammars: before the name, and text that is no such beginning.
_OPENING = rf"/{_SPACE}{{0,256}}\[{_SPACE}{{0,16}}/"
_NO_LIST = rf"/(?s:.*)/ & ~/(?s:{_SPACE}*\[{_SPACE}*[A-Za-z0-9_][A-Za-z0-9_.\-]*{_SPACE}*\(.*)/"
_DEFINITIONS = ("$defs", "definitions")
_SEPARATORS = " \t\r\n,"
_MAX_DEPTH = 32
_MAX_CALL = 1 << 16
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicNotation:
    """The pythonic notation of calls."""

    needs_special_tokens = False
    writes_objects = False

    def parser(self, tools: Sequence[Tool] = ()) -> PythonicParser:
        """Return a parser for one answer."""
        return PythonicParser()

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of a list of calls; values are JSON, which the parser reads too."""
        call = "(" + " | ".join(_call_rule(builder, tool) for tool in tools) + ")"
        return f'"[" {call} (", " {call})* "]"' if is_parallel else f'"[" {call} "]"'

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of a list of calls, then any text; or of text that does not begin like such a list."""
        builder, text.marks = text.builder, None  # a list is known by what it begins with, not by a mark
        heads = [text.lazily(f"{_OPENING} {literal(tool.name + '(')}") for tool in tools]
        first = " | ".join(f"{head} {_arguments_rule(builder, one)}" for head, one in zip(heads, tools, strict=True))
        call = "(" + " | ".join(_call_rule(builder, tool) for tool in tools) + ")"
        noise, other, special = text.noise(), text.lexeme(_NO_LIST), text.specials()
        # Special tokens are left out of the text, so a list may stand behind some.
        skipped = f"({SPACE} {special})*" if special else ""
        rest = f"({special} {noise})?" if special else ""
        return f'{skipped} ({SPACE} | ({first}) (", " {call})* "]" {noise} | {other} {rest})'


def _call_rule(builder: GrammarBuilder, tool: Tool) -> str:
    return f"({literal(tool.name + '(')} {_arguments_rule(builder, tool)})"


def _arguments_rule(builder: GrammarBuilder, tool: Tool) -> str:
    """Return the rule of arguments and `)`: required ones first, then optional ones, each group in schema order."""
    parameters = closed(tool.parameters, tool.is_strict)
    properties = named_arguments(Tool(tool.name, parameters, tool.is_strict), _is_writable)
    demanded = parameters.get("required")
    required = [name for name in properties if isinstance(demanded, list) and name in demanded]
    optional = [name for name in properties if name not in required]
    definitions: dict[str, Any] = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    schemas = {name: {**definitions, **(one if isinstance(one, dict) else {})} for name, one in properties.items()}
    rules = {name: f"{literal(name + '=')} {builder.value(schema, tool.is_strict)}" for name, schema in schemas.items()}
    parts = [rules[name] for name in required]
    inner = ' ", " '.join(parts)
    rest = [rules[name] for name in optional]
    if parts:
        inner += "".join(f' (", " {rule})?' for rule in rest)
    else:
        # Without a required one, each of the others may be the first.
        tails = [f"{rule}" + "".join(f' (", " {after})?' for after in rest[at + 1 :]) for at, rule in enumerate(rest)]
        inner = f"({' | '.join(tails)})?" if tails else ""
    return f'{inner} ")"'


def _is_writable(name: str) -> bool:
    """Return True for a name that Python reads as one; it would read others as their composed form."""
    return name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name


class PythonicParser:
    """Reads calls in the pythonic notation. After the first text that is not a call, everything is content."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "beginning"
        self._call: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escapes = False

    @property
    def is_in_string(self) -> bool:
        """True if the text so far ends within a string of a call."""
        return bool(self._quote)

    def feed(self, text: str) -> list[Event]:
        """Add a delta; return calls that are closed, or content once the text is not a call."""
        events: list[Event] = []
        while text:
            if self._state == "content":
                events.append(Content(text))
                break
            if self._state == "beginning":
                text = self._begin(text)
            elif self._state == "between":
                text = self._between(text)
            else:
                text = self._in_call(text, events)
        return events

    def finish(self) -> list[Event]:
        """End the text; return held back text and an unfinished call as content."""
        held = self._held + "".join(self._call)
        return [Content(held)] if held else []

    def _begin(self, text: str) -> str:
        """Wait for `[name(`; return the text that is still to be read."""
        text = self._held + text
        match = _BEGINNING.match(text)
        assert match is not None, "the expression matches nothing at least"
        self._held = ""
        if match[3]:
            self._state = "between"
            start = text.index("[") + 1
            self._held = text[:start]
            return text[start:]
        if match.end() == len(text):
            self._held = text
            return ""
        self._state = "content"
        return text

    def _between(self, text: str) -> str:
        rest = text.lstrip(_SEPARATORS)
        self._held += text[: len(text) - len(rest)] if self._held else ""
        if rest.startswith("]"):
            self._state, self._held = "content", ""
            return rest[1:]
        if rest:
            self._state = "call"
        return rest

    def _in_call(self, text: str, events: list[Event]) -> str:
        for at, character in enumerate(text):
            if self._quote:
                self._read_string(character)
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._call.append(text[: at + 1])
                    self._end_call(events)
                    return text[at + 1 :]
        self._call.append(text)
        return ""

    def _read_string(self, character: str) -> None:
        if self._escapes:
            self._escapes = False
        elif character == "\\":
            self._escapes = True
        elif character == self._quote:
            self._quote = ""

    def _end_call(self, events: list[Event]) -> None:
        source = "".join(self._call)
        self._call.clear()
        self._depth = 0
        try:
            name, arguments = _read_call(source.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            events.append(Content(self._held + source))
            self._held, self._state = "", "content"
            return
        self._held, self._state = "", "between"
        events.extend((CallBegins(name), CallArguments(arguments)))


def _read_call(source: str) -> tuple[str, str]:
    """Return a call's function name and its arguments as JSON; raise one of many errors for any other text."""
    if len(source) > _MAX_CALL:
        raise ValueError("too long a call")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        name, bracket, rest = source.partition("(")  # a name may have dashes, which Python would subtract
        call = ast.parse(f"call{bracket}{rest}", mode="eval").body
    if not re.fullmatch(_NAME, name.strip()):
        raise ValueError("no name of a function")
    if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
        raise ValueError("no call with arguments by name")
    arguments = {str(one.arg): _literal(one.value, _MAX_DEPTH) for one in call.keywords}
    return name.strip(), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _literal(node: ast.expr, depth: int) -> Any:
    if depth == 0:
        raise ValueError("nested too deep")
    match node:
        case ast.Constant(value=str() as text):
            return whole_characters(text)
        case ast.Constant(value=int() | float() | bool() | None as value):
            return value if value is None else finite(value)
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -finite(value)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element, depth - 1) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key, depth - 1) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key that is no string")
            return {name: _literal(value, depth - 1) for name, value in zip(names, values, strict=True)}
    raise ValueError("no literal")
