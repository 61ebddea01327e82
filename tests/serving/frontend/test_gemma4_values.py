"""Rules of values in Gemma 4's form: which texts they take, with its marks as tokens and spelled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.structured.lazy_vocabulary import MARKS, Vocabulary, vocabulary
from tests.serving.frontend.test_tool_parsers import calls_of, read
from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.tool_parsers.gemma4_values import Gemma4Values
from tokenmill.serving.frontend.tool_parsers.protocol import Tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "of": {"type": "string"}}, "required": ["x"]}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
# By what is shown: the schema of the argument `a`, values that are taken, and some that are not. ' stands for the mark.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a text": ({"type": "string"}, ["''", "'it\"s {a}, b:c\n'"], ['"it"', "it", "1"]),
    "a text with a length": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["'ab'", "'abc'"],
        ["'a'", "'abcd'", "''"],
    ),
    "a pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["'abc'"], ["''", "'d'"]),
    "choices": ({"enum": ["red", 2, None]}, ["'red'", "2", "null"], ["red", "'blue'", "3"]),
    "a text or null": ({"type": ["string", "null"]}, ["'null'", "null", "''"], ["none"]),
    "texts": ({"type": "array", "items": {"type": "string"}}, ["[]", "['a','b']"], ["['a',]", "[a]", "['a''b']"]),
    "an object": (POINT, ["{x:1.5}", "{x:-2,of:'it'}"], ["{}", "{of:'it'}", "{x:1,y:2}", '{"x":1}']),
    "any object": ({"type": "object"}, ["{}", "{b:[1,'c',{d:true}]}"], ["[]", "{1:2}"]),
    "anything": ({}, ["'b'", "[null]", "{b:2.5}"], ["b", "{b}"]),
    "a definition": ({"$ref": "#/$defs/Point"}, ["{x:1}"], ["{}"]),
    "a recursive one is JSON within itself": (
        {"$ref": "#/$defs/Node"},
        ["{next:null}", '{next:{"next": null}}'],
        ["{next:1}"],
    ),
    "what its rules cannot keep is JSON": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ['["b"]'],
        ["[]"],
    ),
}


@pytest.fixture(scope="module", params=[MARKS, ()], ids=["marks", "spelled"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"), request.param)


def parameters_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": schema}, "required": ["a"], "$defs": {"Point": POINT, "Node": NODE}}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_takes_what_its_schema_allows(words: Vocabulary, case: str) -> None:
    schema, taken, refused = CASES[case]
    tool = Tool("f", parameters_of(schema))
    builder = GrammarBuilder(words)
    matcher = words.compiler.compile(builder.grammar([Gemma4Values(builder).arguments(tool)], "tools").text)
    for text, is_taken in ((text, text in taken) for text in (*taken, *refused)):
        written = f"{{a:{text}}}".replace("'", '<|"|>')
        tokens = words.tokenizer.encode(written, add_special_tokens=False)
        own = matcher.deep_copy()
        is_whole = own.validate_tokens(tokens) == len(tokens) and own.consume_tokens(tokens) and own.is_accepting()
        assert is_whole is is_taken, written
        if is_taken:
            parser = NOTATIONS["gemma4"].parser([tool])
            [(name, _)] = calls_of(read(AnswerParser(None, parser), [f"<|tool_call>call:f{written}<tool_call|>"]))
            assert name == "f"


@pytest.mark.parametrize("required", [["b"], []])
def test_keys_keep_their_order_and_optional_ones_may_be_missing(words: Vocabulary, required: list[str]) -> None:
    schemas = {name: {"type": "integer"} for name in "abc"}
    tool = Tool("f", {"properties": schemas, "required": required})
    builder = GrammarBuilder(words)
    matcher = words.compiler.compile(builder.grammar([Gemma4Values(builder).arguments(tool)], "tools").text)
    for written in ("{a:1,b:2,c:3}", "{b:2}", "{a:1,b:2}", "{b:2,c:3}"):
        tokens = words.tokenizer.encode(written, add_special_tokens=False)
        assert matcher.deep_copy().validate_tokens(tokens) == len(tokens), written
    for written in ("{b:2,a:1}", "{,b:2}", "{b:2,}"):
        tokens = words.tokenizer.encode(written, add_special_tokens=False)
        assert matcher.deep_copy().validate_tokens(tokens) < len(tokens), written


def test_a_strict_tool_is_refused_by_what_json_cannot_keep_either(words: Vocabulary) -> None:
    schema = {"type": "array", "uniqueItems": True}
    builder = GrammarBuilder(words)
    rule = Gemma4Values(builder).arguments(Tool("f", parameters_of(schema), is_strict=True))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        words.compiler.compile(builder.grammar([rule], "tools").text)
