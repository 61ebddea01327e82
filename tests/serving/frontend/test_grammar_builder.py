"""Grammar texts put together for a vocabulary, and read back by llguidance as the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class WithoutMarkers:
    """A vocabulary that spells every marker in characters."""

    def token_id(self, token: str) -> int | None:
        return None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_model_path())


@pytest.fixture(scope="module")
def backend() -> LLTokenizer:
    folder = demo_model_path()
    config = json.loads((folder / "config.json").read_text())
    text = (folder / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=config["vocab_size"], eos_token=[config["eos_token_id"]])


def accepts(backend: LLTokenizer, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(backend, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def build(builder: GrammarBuilder, **outputs: Any) -> str:
    return builder.grammar([builder.answer(StructuredOutputs(**outputs))], "response_format").text


@pytest.mark.parametrize(
    ("text", "any_whitespace", "is_right"),
    [
        ('{"a":1}', True, True),
        ('{"a": 1}', True, True),
        ('{\n  "a": 1\n}', True, True),
        ('{\n\n"a":1}', True, False),
        ('{"a":' + " " * 40 + "1}", True, False),
        ('{"a": 1}', False, False),
        ('{"a":1}', False, True),
        ('{"a":"1"}', True, False),
    ],
)
def test_white_space_in_json_is_bounded(
    backend: LLTokenizer, tokenizer: Tokenizer, text: str, any_whitespace: bool, is_right: bool
) -> None:
    grammar = build(GrammarBuilder(tokenizer, any_whitespace), json=SCHEMA)
    assert accepts(backend, tokenizer, grammar, text) is is_right


@pytest.mark.parametrize("vocabulary", ["own tokens", "characters"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_thinking_is_free_and_the_answer_is_not(
    backend: LLTokenizer, tokenizer: Tokenizer, vocabulary: str, has_begun: bool
) -> None:
    builder = GrammarBuilder(tokenizer if vocabulary == "own tokens" else WithoutMarkers())
    thinking = builder.thinking(
        Thinking(
            "<think>" if vocabulary == "own tokens" else "[THINK]",
            "</think>" if vocabulary == "own tokens" else "[/THINK]",
            has_begun,
        )
    )
    begin, end = ("<think>", "</think>") if vocabulary == "own tokens" else ("[THINK]", "[/THINK]")
    rules = [thinking, builder.answer(StructuredOutputs(regex="[0-9]+"))]
    grammar = builder.grammar(rules, "response_format").text
    opening = "" if has_begun else begin
    assert accepts(backend, tokenizer, grammar, f'{opening}\nlet {{me}} see: "12"\n{end}\n\n42')
    assert accepts(backend, tokenizer, grammar, "42") is not has_begun
    assert not accepts(backend, tokenizer, grammar, f"{opening}42")
    assert not accepts(backend, tokenizer, grammar, f"{opening}so{end}x")


def test_a_regex_keeps_its_slashes_and_escapes(backend: LLTokenizer, tokenizer: Tokenizer) -> None:
    for regex, text in ((r"a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), (r"\\/", "\\/"), (r"\d\.\d", "1.5")):
        assert accepts(backend, tokenizer, build(GrammarBuilder(tokenizer), regex=regex), text), regex


def test_a_schema_cannot_set_options_of_the_compiler(tokenizer: Tokenizer) -> None:
    grammar = build(GrammarBuilder(tokenizer), json={**SCHEMA, "x-guidance": {"lenient": True, "coerce_one_of": True}})
    assert json.loads(grammar)["grammars"][1]["json_schema"]["x-guidance"].get("coerce_one_of") is None


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"regex": "a", "json_object": True},
        {"choice": ()},
        {"choice": ("a", "")},
        {"regex": ""},
        {"regex": "a" * (MAX_CHARACTERS + 1)},
        {"json": {"enum": ["a" * MAX_CHARACTERS]}},
    ],
)
def test_what_is_no_use_or_too_large_is_refused(outputs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputs(**outputs)


def test_a_deep_schema_is_refused(tokenizer: Tokenizer) -> None:
    deep = json.loads('{"items":' * 100 + "{}" + "}" * 100)
    with pytest.raises(InvalidRequest, match="nested"):
        build(GrammarBuilder(tokenizer), json=deep)


ARITHMETIC = r"""
root   ::= term ([-+*/] term)*   # a comment
term   ::= number | "(" root ")"
number ::= "-"? [0-9]{1,3} ("\u00b2" | "\x21")?
"""


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("1", True), ("(1+22)*-333", True), ("7\u00b2", True), ("7!", True), ("1234", False), ("(1", False), ("", False)],
)
def test_a_grammar_in_gbnf_is_translated(backend: LLTokenizer, tokenizer: Tokenizer, text: str, is_right: bool) -> None:
    assert accepts(backend, tokenizer, build(GrammarBuilder(tokenizer), grammar=ARITHMETIC), text) is is_right


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= missing", "Rule 'missing' not found"),
        ('begin ::= "a"', "No 'root' rule found"),
        ('root ::= ("a"', "Expected"),
        ("root ::= " + "(" * 5000, "GBNF"),
        ("".join(f"r{i} ::= r{i + 1}\n" for i in range(6000)), "too large"),
    ],
)
def test_a_grammar_in_gbnf_that_cannot_be_translated_is_refused_by_that_name(
    tokenizer: Tokenizer, text: str, why: str
) -> None:
    with pytest.raises(InvalidRequest, match="the GBNF grammar .*" + why.replace("GBNF", "")):
        build(GrammarBuilder(tokenizer), grammar=text)


def test_larks_notation_is_not_taken_for_gbnf(backend: LLTokenizer, tokenizer: Tokenizer) -> None:
    assert accepts(backend, tokenizer, build(GrammarBuilder(tokenizer), grammar='start: "::=" "x"'), "::=x")


@pytest.mark.parametrize(
    ("outputs", "name"),
    [
        ({"grammar": "start: ("}, "the Lark grammar cannot be used"),
        ({"grammar": 'root ::= "\\u0000" [z-a]'}, "the GBNF grammar cannot be used"),
        ({"regex": "(a"}, "the regular expression cannot be used"),
        ({"json": {"type": "strange"}}, "the JSON schema cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_called_what_it_is(tokenizer: Tokenizer, outputs: Any, name: str) -> None:
    folder = demo_model_path()
    config = json.loads((folder / "config.json").read_text())
    known = GrammarTokenizer(str(folder / "tokenizer.json"), config["vocab_size"], (config["eos_token_id"],))
    with pytest.raises(InvalidRequest, match=name):
        GrammarCompiler(known).compile(build(GrammarBuilder(tokenizer), **outputs))


@pytest.mark.parametrize(
    ("changes", "is_strict", "text", "is_right"),
    [
        ({}, False, '{"a":1}', True),
        ({}, False, '{"a":1,"b":2}', False),
        ({"additionalProperties": True}, False, '{"a":1,"b":2}', True),
        ({"additionalProperties": True}, True, '{"a":1,"b":2}', False),
        ({"additionalProperties": True}, True, '{"a":1}', True),
    ],
)
def test_arguments_are_a_closed_object(
    backend: LLTokenizer, tokenizer: Tokenizer, changes: Any, is_strict: bool, text: str, is_right: bool
) -> None:
    parameters = {"properties": {"a": {"type": "integer"}}, "required": ["a"]} | changes
    builder = GrammarBuilder(tokenizer)
    grammar = builder.grammar([builder.arguments(parameters, is_strict)], "tools").text
    assert accepts(backend, tokenizer, grammar, text) is is_right


@pytest.mark.parametrize(("most", "length", "is_right"), [(5, 5, True), (5, 6, False), (0, 60, True)])
def test_strings_without_a_length_get_the_servers(
    backend: LLTokenizer, tokenizer: Tokenizer, most: int, length: int, is_right: bool
) -> None:
    grammar = build(GrammarBuilder(tokenizer, max_string_length=most), json={"type": "string"})
    assert accepts(backend, tokenizer, grammar, json.dumps("x" * length)) is is_right
