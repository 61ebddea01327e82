"""Turn a Lark grammar into one regular expression, which a grammar of calls can keep inside a JSON string.

In a string each character may be escaped, so terminals cannot be matched one by one there; one expression of the whole
text can. A grammar whose rules call themselves is unrolled: to as many levels as fit, at most `MOST_LEVELS`.

    rules, terminals, | * + ? ~n..m, ( ), [ ]    read
    "text"i, "a".."z", /expression/flags         read
    %import common.NAME, %ignore                 read; ignored text may stand before each terminal of a rule
    -> alias, ?rule, !rule, priorities           read and dropped: they concern trees
    templates, %declare, %extend, other imports  refused

Does not know what the expressions mean: a grammar's compiler reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.structured_outputs import MAX_CHARACTERS

MOST_LEVELS = 6
_MOST_CHARACTERS, _MOST_STEPS, _MOST_NESTED = 32 << 10, 20_000, 200

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*)|(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^\\/\n])+/[imslux]*)
    |(?P<directive>%[a-z]+)|(?P<name>[?!]*[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)
    |(?P<mark>->|\.\.|[:|()\[\]*+?~.,])""",
    re.VERBOSE,
)
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
        "DIGIT": "[0-9]", "HEXDIGIT": "[0-9A-Fa-f]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
        "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
        "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
        "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
        "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
        "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
        "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
        "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*",
    }
)  # fmt: skip
"""The terminals of Lark's module `common`."""


class _Node(msgspec.Struct, frozen=True):
    """A part of a grammar: `seq`, `alt`, `repeat` of `parts`; `regex` or `name` in `text`."""

    kind: str
    parts: tuple[_Node, ...] = ()
    text: str = ""


@dataclass(slots=True)
class _Grammar:
    rules: dict[str, _Node] = field(default_factory=dict)
    ignored: list[_Node] = field(default_factory=list)


class _TooLarge(Exception):
    """Unrolled to so many levels, the expression is too long."""


def lark_regex(text: str, where: str) -> str:
    """Return an expression of the texts that the rule `start` of a grammar derives.

    Args:
        where: the place of the grammar in a request, for error messages.

    Raises:
        InvalidRequest: it is no such grammar, or cannot be written as one expression.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{where}: at most {MAX_CHARACTERS} characters", "tools")
    grammar = _Reader(text, where).grammar()
    for levels in range(MOST_LEVELS, 0, -1):
        try:
            found = _Unroller(grammar, levels, where).whole()
        except _TooLarge:
            continue
        if found is None:
            raise InvalidRequest(f"{where}: nothing matches the rule start within {levels} levels", "tools")
        return found
    raise InvalidRequest(f"{where}: the grammar is too large to be kept inside a call", "tools")


class _Reader:
    """Reads the text of a grammar."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._tokens: list[tuple[str, str]] = []
        self._at = self._depth = 0
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._fault(f"not Lark at {text[position : position + 20]!r}")
            position = match.end()
            if match.lastgroup != "space":
                self._tokens.append((str(match.lastgroup), match[0]))

    def grammar(self) -> _Grammar:
        """Return the grammar."""
        grammar = _Grammar()
        while self._skip_lines():
            kind, text = self._next()
            if kind == "directive":
                self._directive(text, grammar)
            elif kind == "name":
                self._priority()
                self._expect(":")
                grammar.rules[text.lstrip("?!")] = self._alternatives()
            else:
                raise self._fault(f"a rule was expected at {text!r}")
        return grammar

    def _directive(self, text: str, grammar: _Grammar) -> None:
        if text == "%ignore":
            grammar.ignored.append(self._alternatives())
            return
        if text != "%import":
            raise self._fault(f"{text} is not supported")
        line = []
        while self._at < len(self._tokens) and self._tokens[self._at][0] != "line":
            line.append(self._next()[1])
        if line[:1] != ["common"]:
            raise self._fault("only terminals of common can be imported")
        names = [word for word in line[1:] if word not in (".", "(", ")", ",")]
        pairs = [(names[0], names[2])] if names[1:2] == ["->"] else [(name, name) for name in names]
        for name, own in pairs:
            if name not in COMMON:
                raise self._fault(f"common.{name} is not known")
            grammar.rules[own] = _Node("regex", text=COMMON[name])

    def _alternatives(self) -> _Node:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._fault("nested too deep")
        options = [self._sequence()]
        while self._is_mark("|", after_lines=True):
            options.append(self._sequence())
        self._depth -= 1
        return _Node("alt", tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (atom := self._atom()) is not None:
            parts.append(self._repeated(atom))
        if self._is_mark("->"):
            self._next()
        return _Node("seq", tuple(parts))

    def _atom(self) -> _Node | None:
        start = self._at
        if self._depth > 1:
            self._skip_lines()
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind == "name" and not self._begins_rule():
            self._at += 1
            return _Node("name", text=text)
        if kind in ("text", "regex"):
            self._at += 1
            return self._literal(kind, text)
        if text in ("(", "["):
            self._at += 1
            inner = self._alternatives()
            self._skip_lines()
            self._expect(")" if text == "(" else "]")
            return inner if text == "(" else _Node("repeat", (inner,), "?")
        self._at = start
        return None

    def _literal(self, kind: str, text: str) -> _Node:
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            flags = "".join(flag for flag in flags if flag in "imsx")
            return _Node("regex", text=f"(?{flags}:{body})" if flags else f"(?:{body})")
        own = _unescaped(text.rstrip("i"))
        if self._is_mark(".."):
            _, last = self._next()
            return _Node("regex", text=f"[{re.escape(own)}-{re.escape(_unescaped(last.rstrip('i')))}]")
        return _Node("regex", text=f"(?{'i' if text.endswith('i') else ''}:{_escaped(own)})")

    def _repeated(self, atom: _Node) -> _Node:
        for mark in "*+?":
            if self._is_mark(mark):
                return _Node("repeat", (atom,), mark)
        if not self._is_mark("~"):
            return atom
        least = most = self._number()
        if self._is_mark(".."):
            most = self._number()
        return _Node("repeat", (atom,), f"{{{least},{most}}}")

    def _number(self) -> int:
        kind, text = self._next()
        if kind != "number" or len(text) > 4:
            raise self._fault(f"a number below 10,000 was expected at {text!r}")
        return int(text)

    def _begins_rule(self) -> bool:
        """Return True at `name:` or `name.1:`."""
        words = [text for _, text in self._tokens[self._at + 1 : self._at + 4]]
        return words[:1] == [":"] or (words[:1] == ["."] and words[2:] == [":"])

    def _priority(self) -> None:
        if self._is_mark("."):
            self._next()

    def _skip_lines(self) -> bool:
        """Skip line breaks; return False at the end."""
        while self._at < len(self._tokens) and self._tokens[self._at][0] == "line":
            self._at += 1
        return self._at < len(self._tokens)

    def _is_mark(self, mark: str, after_lines: bool = False) -> bool:
        """Read a mark, if it comes next."""
        start = self._at
        if after_lines:
            self._skip_lines()
        if self._at < len(self._tokens) and self._tokens[self._at] == ("mark", mark):
            self._at += 1
            return True
        self._at = start
        return False

    def _expect(self, mark: str) -> None:
        if not self._is_mark(mark):
            raise self._fault(f"{mark!r} was expected")

    def _next(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise self._fault("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _fault(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._where}: the Lark grammar cannot be used: {what}", "tools")


class _Unroller:
    """Writes a grammar as an expression, each rule at most `levels` deep within itself."""

    def __init__(self, grammar: _Grammar, levels: int, where: str) -> None:
        self._grammar, self._levels, self._where = grammar, levels, where
        self._open: Counter[str] = Counter()
        self._steps = 0
        skipped = [one for node in grammar.ignored if (one := self._of(node, True)) is not None]
        self._ignored = f"(?:{'|'.join(skipped)})*" if skipped else ""

    def whole(self) -> str | None:
        """Return the expression of the rule `start`; None: nothing matches it at this depth."""
        found = self._of(_Node("name", text="start"), False)
        return None if found is None else found + self._ignored

    def _of(self, node: _Node, is_terminal: bool) -> str | None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooLarge
        match node.kind:
            case "regex":
                found: str | None = node.text if is_terminal else self._ignored + node.text
            case "name":
                found = self._rule(node.text, is_terminal)
            case "repeat":
                inner = self._of(node.parts[0], is_terminal)
                found = f"(?:{inner}){node.text}" if inner is not None else "" if node.text in ("*", "?") else None
            case "seq":
                parts = [self._of(part, is_terminal) for part in node.parts]
                found = None if None in parts else "".join(part for part in parts if part is not None)
            case _:
                options = [one for part in node.parts if (one := self._of(part, is_terminal)) is not None]
                found = f"(?:{'|'.join(options)})" if options else None
        if found is not None and len(found) > _MOST_CHARACTERS:
            raise _TooLarge
        return found

    def _rule(self, name: str, is_terminal: bool) -> str | None:
        if name not in self._grammar.rules:
            raise InvalidRequest(f"{self._where}: the Lark grammar cannot be used: no rule {name[:80]}", "tools")
        if self._open[name] >= self._levels:
            return None
        self._open[name] += 1
        is_inner = is_terminal or name.lstrip("_").isupper()
        found = self._of(self._grammar.rules[name], is_inner)
        self._open[name] -= 1
        return self._ignored + found if found is not None and is_inner and not is_terminal else found


def _unescaped(text: str) -> str:
    """Return the characters of a string between quotes."""
    escapes = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", lambda found: _character(found[1], escapes), text[1:-1])


def _character(escape: str, escapes: Mapping[str, str]) -> str:
    return chr(int(escape[1:], 16)) if len(escape) > 1 else escapes.get(escape, escape)


def _escaped(text: str) -> str:
    """Return an expression of this text alone."""
    return re.escape(text).replace("\n", "n").replace("\r", "r").replace("\t", "t").replace("\\ ", " ")
