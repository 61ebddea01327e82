"""A mark that is spelled in a string of a call is text, and numbers that no reader holds do not lose their call."""

from __future__ import annotations

import json
import random
import sys

import pytest

from tests.model.structured.test_custom_grammars import call
from tests.serving.frontend.test_tool_parsers import answer_parser, calls_of, cut, read, texts
from tokenmill.serving.frontend.tool_parsers.gemma4_values import QUOTE
from tokenmill.serving.frontend.tool_parsers.protocol import Tool

MARKS = ("<tool_call|>", "<|tool_call_end|>", "</tool_call>", "<|tool_call|>", '<|"|>', "]", "}", ")", "\\", "'", '"')
WRITTEN = ("hermes", "llama3_json", "mistral", "pythonic", "lfm2", "granite", "phi4_mini_json", "gemma4")


@pytest.mark.parametrize("notation", WRITTEN)
def test_marks_in_strings_end_nothing(notation: str) -> None:
    rng = random.Random(notation)
    # Gemma's own strings end at their mark, which no grammar lets into one.
    marks = [mark for mark in MARKS if (notation, mark) != ("gemma4", QUOTE)]
    for _ in range(60):
        text = "".join(rng.choice([*marks, "a", " "]) for _ in range(rng.randint(1, 12)))
        [(name, arguments)] = calls_of(read(answer_parser(notation), cut(rng, call(notation, text))))
        assert (name, json.loads(arguments)) == ("apply_patch", {"input": text})


def test_gemmas_own_strings_hold_its_marks_too() -> None:
    written = '<|tool_call>call:f{a:<|"|>x<tool_call|>"}<|"|>,b:[<|"|>\\<|"|>]}<tool_call|>.'
    for places in range(40):
        pieces = read(answer_parser("gemma4"), cut(random.Random(places), written))
        assert calls_of(pieces) == [("f", json.dumps({"a": 'x<tool_call|>"}', "b": ["\\"]}))]
        assert texts(pieces) == "."


def test_json_among_tags_holds_their_marks() -> None:
    tools = [Tool("f", {"properties": {"items": {"type": "array"}, "text": {"type": "string"}}})]
    written = (
        '<tool_call>\n<function=f>\n<parameter=items>\n["</parameter>", "\\"</parameter>"]\n</parameter>\n'
        '<parameter=text>\na "\n</parameter>\n</function>\n</tool_call>'
    )
    for places in range(40):
        [(_, arguments)] = calls_of(read(answer_parser("qwen3_coder", tools), cut(random.Random(places), written)))
        assert json.loads(arguments) == {"items": ["</parameter>", '"</parameter>'], "text": 'a "'}
    broken = written.replace('["</parameter>", "\\"</parameter>"]', '["a')
    [(_, arguments)] = calls_of(read(answer_parser("qwen3_coder", tools), [broken]))
    assert json.loads(arguments) == {"items": '["a', "text": 'a "'}, "no line break is in a string"


@pytest.mark.parametrize(
    ("notation", "written"),
    [
        ("pythonic", "[f(a=1e999, b=-1e999)]"),
        ("lfm2", "<|tool_call_start|>[f(a=1e999, b=-1e999)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{a:1e999,b:-1e999}<tool_call|>"),
    ],
)
def test_a_number_that_is_too_large_is_the_largest(notation: str, written: str) -> None:
    [(name, arguments)] = calls_of(read(answer_parser(notation), [written]))
    assert (name, json.loads(arguments)) == ("f", {"a": sys.float_info.max, "b": -sys.float_info.max})


@pytest.mark.parametrize("name", ["mcp__my-server__look", "a.b-c", "3d"])
def test_names_need_not_be_those_of_python(name: str) -> None:
    assert calls_of(read(answer_parser("pythonic"), [f"[{name}(a=1)]"])) == [(name, '{"a": 1}')]
