"""Arguments as plain text: what a grammar of calls takes of them, and what a strict tool is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.structured.lazy_vocabulary import Vocabulary, vocabulary
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import CallRules
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.prompt_processor import answer_grammar


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"), ())


def grammar_of(words: Vocabulary, notation: str, parameters: dict[str, Any], strict: bool | None) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
    rules = CallRules(notation, ["f"], is_required=False, is_parallel=True, is_lazy=True)
    return answer_grammar(GrammarBuilder(words), None, rules, tools, None)


def takes(words: Vocabulary, schema: dict[str, Any], text: str) -> bool:
    grammar = grammar_of(words, "qwen3_coder", {"properties": {"a": schema}, "required": ["a"]}, None)
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    tokens = words.tokenizer.encode(written, add_special_tokens=False)
    return bool(words.compiler.compile(grammar.text).deep_copy().validate_tokens(tokens) == len(tokens))


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (TEXT, ["", "a", "a\n\nb", "</param"], ["a</parameter>b"]),
        (TEXT | {"minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        (TEXT | {"maxLength": 30}, ["a</parameter"], ["a</parameter>b", "</parameter>"]),
        (TEXT | {"maxLength": 0}, [""], ["a"]),
        (TEXT | {"pattern": "^[a-c]+$|x"}, ["abc", "dxd"], ["d", "abd"]),
        (TEXT | {"pattern": "a", "maxLength": 2}, ["ab"], ["bb", "abb"]),
        (TEXT | {"format": "date"}, ["2026-11-26"], ["26 November", "2026-13-01"]),
        ({"enum": ["a", "b\nc"]}, ["a", "b\nc"], ["c"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"type": ["string", "null"], "maxLength": 1}, ["a", "null"], ["nul"]),
        ({"anyOf": [TEXT | {"maxLength": 1}, {"type": "integer"}, {"type": "null"}]}, ["a", "7", "null"], ["ab", "77"]),
        ({"anyOf": [TEXT | {"format": "ipv4"}, {"enum": ["none"]}]}, ["10.0.0.1", "none"], ["10.0.0"]),
    ],
)
def test_a_text_is_what_its_schema_says(
    words: Vocabulary, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert takes(words, schema, text), text
    for text in bad:
        assert not takes(words, schema, text), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (TEXT | {"pattern": "(^a)"}, "the pattern '\\(\\^a\\)'"),
        (TEXT | {"format": "iri"}, "the format 'iri'"),
        (TEXT | {"maxLength": 5000}, "maxLength above 1024"),
        (TEXT | {"allOf": [{"minLength": 1}]}, "allOf of a text"),
        ({"oneOf": [TEXT, {"enum": ["a"]}]}, "oneOf"),
        ({"enum": ["</parameter>"]}, "a text that holds </parameter>"),
    ],
)
def test_a_strict_tool_is_refused_what_is_not_kept(words: Vocabulary, schema: dict[str, Any], named: str) -> None:
    parameters = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match=f"tools: f is strict.* keep to {named}"):
        grammar_of(words, "qwen3_coder", parameters, True)
    assert takes(words, schema, "x"), "left out"
    assert grammar_of(words, "hermes", parameters, True) is not None


@pytest.mark.parametrize("notation", ["qwen3_coder", "pythonic", "lfm2"])
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"properties": {"a>\n b": TEXT}, "required": ["a>\n b"]}, "the argument"),
        ({"properties": {}, "required": ["a"]}, "the argument 'a'"),
        ({"properties": {"a": TEXT}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
    ],
)
def test_so_is_what_is_said_of_the_whole_object(
    words: Vocabulary, notation: str, parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"keep to {named}"):
        grammar_of(words, notation, parameters, True)
    assert grammar_of(words, notation, parameters, None).is_optional


def test_names_that_python_cannot_write_are_refused(words: Vocabulary) -> None:
    for name in ("class", "a b", "ﬁ"):
        with pytest.raises(InvalidRequest, match="the argument"):
            grammar_of(words, "pythonic", {"properties": {name: TEXT}, "required": [name]}, True)
