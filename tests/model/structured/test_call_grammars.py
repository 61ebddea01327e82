"""Every text that a grammar of calls allows is read by the parser of its notation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.frontend.test_tool_parsers import calls_of, read
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.messages import CallRules
from tokenmill.demo import demo_model_path
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.tool_parsers.protocol import read_tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
ARGUMENTS = '{"city": "Ulm", "days": 2, "unit": "C", "tags": ["a"]}'
OBJECT = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
TAGS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    '<parameter=unit>\nC\n</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>'
)
PYTHONIC = '[get_weather(city="Ulm", days=2, unit="C", tags=["a"])]'
GEMMA = '{city:<|"|>Ulm<|"|>,days:2,unit:<|"|>C<|"|>,tags:[<|"|>a<|"|>]}'


@pytest.mark.parametrize(
    ("notation", "text", "refused"),
    [
        ("qwen3_coder", TAGS, TAGS.replace("\n2\n", "\ntwo\n")),
        ("qwen3_coder", TAGS, TAGS.replace("=days", "=hours")),
        ("lfm2", f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>", PYTHONIC),
        ("gemma4", f"<|tool_call>call:get_weather{GEMMA}<tool_call|>", f"<|tool_call>call:get{GEMMA}"),
        ("gemma4", f"<|tool_call>call:get_weather{GEMMA}<tool_call|>", f"<|tool_call>call:get_weather{ARGUMENTS}"),
        ("granite", f"<|tool_call|>[{OBJECT}]", f"<|tool_call|>{OBJECT}"),
        ("phi4_mini_json", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", f"<|tool_call|>[{OBJECT}]."),
    ],
)
def test_a_call_that_the_grammar_takes_is_read(notation: str, text: str, refused: str) -> None:
    folder: Path = demo_model_path()
    tokenizer = Tokenizer.load(folder)
    rules = CallRules(notation, ["get_weather"], True, True)
    grammar = answer_grammar(GrammarBuilder(tokenizer), None, rules, TOOLS, None)
    assert grammar is not None
    ends = tuple(sorted(eos_token_ids(folder)))
    compiled = GrammarCompiler(GrammarTokenizer(str(folder / "tokenizer.json"), 2560, ends)).compile(grammar.text)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert compiled.deep_copy().validate_tokens(tokens) == len(tokens)
    other = tokenizer.encode(refused, add_special_tokens=False)
    assert compiled.deep_copy().validate_tokens(other) < len(other)
    tools = [read_tool(tool) for tool in TOOLS]
    [(name, arguments)] = calls_of(read(AnswerParser(None, NOTATIONS[notation].parser(tools)), [text]))
    assert (name, json.loads(arguments)) == ("get_weather", json.loads(OBJECT)["arguments"])
