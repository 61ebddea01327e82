"""Build one grammar in llguidance's form from the constraints that a client puts on an answer.

    answer      the JSON schema, regex, choices or Lark grammar
    calls       of tools, in the model's own notation, before, instead of or without an answer
    thinking    comes before all of it where the model thinks, and is free

Knows the tokenizer, because markers such as `</think>` may be tokens of their own; does not compile anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.sampling_params import Grammar
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.frontend.json_schema import closed, with_string_lengths

# Between the parts of a JSON text: nothing, a space, or a new line with an indent. Unlimited space would be legal JSON,
# and a model that has lost its way would fill its context with it.
_WHITESPACE = r"( |\n {0,16})?"
_GAP = r"/[ \n]{0,4}/"
_SPECIAL = re.compile(r"(<\|\w+\|?>|<\w+\|>)")
# Where only one text can follow, masks would have no tokens but those that the tokenizer spells it with, though the
# grammar takes any others of the same text. What a grammar allows must not depend on how it is asked.
_OPTIONS = '%llguidance {"no_forcing": true}'

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# A character by its number; the translator has its trouble with leading zeros.
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
# Rules times characters: the translator looks through all rules once for each that it settles. A quarter of a second.
_MAX_WORK = 1 << 25


class Vocabulary(Protocol):
    """The part of a tokenizer that a grammar needs."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None for an unknown one."""

    def ids_outside_text(self) -> Sequence[int]:
        """Return, ascending, the ids that are no text of their own: added tokens, parts of characters, gaps."""


class Thinking(msgspec.Struct, frozen=True):
    """A model's thinking marks, whether the prompt has begun the thinking, and the opening of an answer in text."""

    begin: str
    end: str
    has_begun: bool
    opening: str = ""


class GrammarBuilder:
    """Collects the grammars that make up an answer, each under a name of its own."""

    def __init__(self, vocabulary: Vocabulary, any_whitespace: bool = True, max_string_length: int = 0) -> None:
        """`max_string_length`: most characters of a string whose schema sets no length; 0: any number."""
        self.vocabulary = vocabulary
        self._max_string_length = max_string_length
        self._any_whitespace = any_whitespace
        self._parts: list[dict[str, Any]] = []

    def marker(self, text: str) -> str:
        """Return the rule for a marker: its own token if the vocabulary has one, else characters and special tokens."""
        return " ".join(self.pieces(text))

    def pieces(self, text: str) -> list[str]:
        """Return the rules that make up a marker: of tokens, and of texts between them."""
        token_id = self.vocabulary.token_id(text)
        if token_id is not None:
            return [f"<[{token_id}]>"]
        pieces = [piece for piece in _SPECIAL.split(text) if piece]
        return [literal(text)] if len(pieces) == 1 else [rule for piece in pieces for rule in self.pieces(piece)]

    def schema(self, text: str, param: str, is_lenient: bool = False) -> str:
        """Return the rule for a JSON value that matches a schema.

        Raises:
            InvalidRequest: the text is not a JSON schema.
        """
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("the JSON schema is not JSON", param) from error
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise InvalidRequest("a JSON schema must be an object", param)
        check_depth(schema, param)
        return self._schema(schema, is_lenient)

    def arguments(self, parameters: dict[str, Any], is_strict: bool = False) -> str:
        """Return the rule for a function's arguments: a closed object, unless a lenient schema opens it."""
        return self.value(closed({"type": "object", **parameters}, is_strict), is_strict)

    def value(self, schema: dict[str, Any], is_strict: bool = False) -> str:
        """Return the rule for a JSON value; what is not supported in its schema is left out, or refused if strict."""
        notation = "JSON_schema_of_a_strict_tool" if is_strict else "JSON_schema"
        return self._schema(schema, is_lenient=not is_strict, notation=notation)

    def text_before(self, end: str, least: int = 0, most: int = 0, forms: Sequence[str] = ()) -> str:
        """Return the rule for text without `end`, a line break, and `end`.

        Args:
            most: in characters; 0: as long as any other string.
            forms: regular expressions, each of which the text matches as a whole.
        """
        most = most or self._max_string_length
        if not (least or most or forms):
            return self.lark(f"start: text\ntext[suffix={literal(end)}]: /(?s:.*)/")
        length = f"(?s:.{{{least},{max(most, least) if most else ''}}})"
        own = " & ".join(f"/{_escaped_regex(form)}/" for form in (length, *forms))
        ending = _escaped_regex(re.escape(end))
        value = f"VALUE: CLOSED & ~/(?s:.*){ending}(?s:.+)/"
        return self.lark(f"start: VALUE\n{value}\nCLOSED: OWN {literal(chr(10) + end)}\nOWN: {own}")

    def text_between(self, quote: str, mark: str, least: int = 0, most: int = 0, forms: Sequence[str] = ()) -> str:
        """Return the rule for a text between two marks, which does not hold the mark.

        Args:
            quote: the rule of the mark, see `marker`. least, most, forms: see `text_before`.
        """
        most = most or self._max_string_length
        length = f"(?s:.{{{least},{max(most, least) if most else ''}}})"
        own = " & ".join(f"/{_escaped_regex(form)}/" for form in (length, *forms))
        holding = _escaped_regex(re.escape(mark))
        if quote.startswith("<["):
            may_be_empty = "?" if not least and all(map(_takes_nothing, forms)) else ""
            return self.lark(f"start: {quote} OWN{may_be_empty} {quote}\nOWN: {own} & ~/(?s:.*){holding}(?s:.*)/")
        value = f"VALUE: CLOSED & ~/(?s:.*){holding}(?s:.+)/"
        return self.lark(f"start: {quote} VALUE\n{value}\nCLOSED: OWN {literal(mark)}\nOWN: {own}")

    def lark(self, text: str, notation: str = "part") -> str:
        """Return the rule for a grammar whose start rule is `start`."""
        return self._part({"lark_grammar": text}, notation)

    def answer(self, outputs: StructuredOutputs) -> str:
        """Return the rule for an answer.

        Raises:
            InvalidRequest: the text given as a JSON schema is not one.
        """
        if outputs.regex is not None:
            return self.lark(f"start: /{_escaped_regex(outputs.regex)}/", "regular_expression")
        if outputs.choice is not None:
            return self.lark("start: " + " | ".join(map(literal, outputs.choice)))
        if outputs.grammar is not None and is_gbnf(outputs.grammar):
            return self.lark(to_lark(outputs.grammar, outputs.param), "GBNF_grammar")
        if outputs.grammar is not None:
            return self.lark(outputs.grammar, "Lark_grammar")
        return self.schema(outputs.schema_text(), outputs.param, outputs.is_lenient)

    def thinking(self, thinking: Thinking) -> str:
        """Return the rule for thinking, which is optional unless the prompt has begun it."""
        end = self.marker(thinking.end)
        begin = "" if thinking.has_begun else self.marker(thinking.begin)
        if not end.startswith("<["):
            text = f"start: {begin} text {_GAP}\ntext[suffix={literal(thinking.end)}]: /(?s:.*)/"
        else:
            text = f"start: {begin} text {end} {_GAP}\ntext: /(?s:.*)/"
        return self.lark(text) + ("" if thinking.has_begun else "?")

    def grammar(
        self, rules: Sequence[str], param: str, is_optional: bool = False, marks: tuple[str, ...] | None = None
    ) -> Grammar:
        """Return the whole grammar: these rules, one after the other; see `Grammar` for `is_optional` and `marks`."""
        # An optional one must not be taken for its equal that is not: the compiler goes by the text.
        note = "// optional\n" if is_optional else ""
        start = {"lark_grammar": f"{_OPTIONS}\n{note}start: " + " ".join(rules)}
        return Grammar(json.dumps({"grammars": [start, *self._parts]}, ensure_ascii=False), param, is_optional, marks)

    def _schema(self, schema: dict[str, Any], is_lenient: bool, notation: str = "JSON_schema") -> str:
        spacing = {"whitespace_pattern": _WHITESPACE} if self._any_whitespace else {"whitespace_flexible": False}
        if self._max_string_length:
            schema = with_string_lengths(schema, self._max_string_length)
        return self._part({"json_schema": {**schema, "x-guidance": {**spacing, "lenient": is_lenient}}}, notation)

    def _part(self, grammar: dict[str, Any], notation: str) -> str:
        # The compiler tells by the name what a grammar was written in.
        name = f"{notation}{len(self._parts)}"
        self._parts.append({"name": name, **grammar})
        return f"@{name}"


def anything() -> str:
    """Return the text of the grammar that allows all tokens."""
    return json.dumps({"grammars": [{"lark_grammar": f"{_OPTIONS}\nstart: (<[*]>)*"}]})


def literal(text: str) -> str:
    """Return a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _takes_nothing(form: str) -> bool:
    """Return True if the empty text matches a regular expression, as far as Python reads it as llguidance does."""
    try:
        return re.fullmatch(form, "") is not None
    except re.error:
        return False


def _escaped_regex(regex: str) -> str:
    """Escape slashes and line breaks, so that a regular expression can stand between slashes."""
    characters = iter(regex)
    escaped = []
    for character in characters:
        if character == "\\":
            escaped.append(character + next(characters, ""))
        else:
            escaped.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(character, character))
    return "".join(escaped)


def is_gbnf(text: str) -> bool:
    """Return True if a grammar has rules in GBNF notation, `name ::= ...`."""
    return _RULE.search(text) is not None


def to_lark(text: str, param: str) -> str:
    """Translate a grammar to Lark; its rule `root` becomes `start`.

    Raises:
        InvalidRequest: it is not GBNF, or too large.
    """
    if len(_RULE.findall(text)) * len(text) > _MAX_WORK:
        raise InvalidRequest("the GBNF grammar is too large: write it in Lark's notation", param)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, text)).removeprefix("%llguidance {}\n\n")
    except Exception as error:  # the translator raises plain ones, and a RecursionError where it is nested too deep
        raise InvalidRequest(f"the GBNF grammar cannot be used: {' '.join(str(error).split())[:300]}", param) from error


def _character(escape: re.Match[str]) -> str:
    number = int(escape[1], 16)
    return chr(number) if number >= 0x80 and not 0xD800 <= number < 0xE000 else escape[0]
