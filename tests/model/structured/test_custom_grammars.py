"""Inputs of custom tools follow their Lark grammar in calls of any notation; llguidance's Lark is the oracle."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from tests.model.structured.lazy_vocabulary import MARKS, Vocabulary, vocabulary
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import CallRules
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.lark_regex import lark_regex
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.tool_parsers.protocol import CallArguments, read_tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS
from tokenmill.serving.server.openai.response_tools import custom_input, read_tools

SEED = seed_for(__name__)
# A grammar of patches: files are added, deleted, or changed line by line.
PATCH = """
start: begin file+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
file: added | deleted | updated

added: "*** Add File: " path LF ("+" /(.*)/ LF -> line)+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? change?
moved: "*** Move to: " path LF
path: /(.+)/

change: (context | edit)+ at_end?
context: ("@@" | "@@ " /(.+)/) LF
edit: ("+" | "-" | " ") /(.*)/ LF
at_end: "*** End of File" LF  // at the very end

%import common.LF
"""
SUM = """
?start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: "0".."9"+
%import common (WS)
%ignore WS
"""
GOOD = (
    '*** Begin Patch\n*** Add File: a.py\n+print("\\n")\n*** Update File: b\n@@ def f\n-\told\n+new\n*** End Patch\n',
    "*** Begin Patch\n*** Delete File: c\n*** End Patch",
)
BAD = (
    GOOD[0].replace("+new", "new"),
    GOOD[0].replace(" Begin", " begin"),
    GOOD[1].replace("*** Delete File: c\n", ""),
    GOOD[1] + "\n\nDone.",
)
WRITTEN = [name for name in NOTATIONS if name != "openai"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"), MARKS)


def tools_of(definition: str, syntax: str = "lark") -> list[dict[str, Any]]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return read_tools([{"type": "custom", "name": "apply_patch", "format": form}]).functions


def call(notation: str, text: str) -> str:
    """A call with this input as a model of the notation would write it."""
    objects = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    listed = f"[apply_patch(input={json.dumps(text)})]"
    return {
        "hermes": f"<tool_call>\n{objects}\n</tool_call>",
        "llama3_json": objects.replace("arguments", "parameters", 1),
        "mistral": f"[TOOL_CALLS][{objects}]",
        "pythonic": listed,
        "qwen3_coder": (
            f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
        ),
        "lfm2": f"<|tool_call_start|>{listed}<|tool_call_end|>",
        "granite": f"<|tool_call|>[{objects}]",
        "phi4_mini_json": f"<|tool_call|>[{objects}]<|/tool_call|>",
        "gemma4": f'<|tool_call>call:apply_patch{{input:<|"|>{text}<|"|>}}<tool_call|>',
    }[notation]


@pytest.mark.parametrize("notation", WRITTEN)
def test_a_call_takes_what_the_grammar_takes(words: Vocabulary, notation: str) -> None:
    rules = CallRules(notation, ["apply_patch"], is_required=False, is_parallel=True, is_lazy=True)
    grammar = answer_grammar(GrammarBuilder(words), None, rules, tools_of(PATCH), None)
    assert grammar is not None
    assert not grammar.is_optional, "what cannot be kept is refused"
    matcher = words.compiler.compile(grammar.text)
    for texts, is_good in ((GOOD, True), (BAD, False)):
        for text in texts:
            tokens = words.tokenizer.encode(call(notation, text), add_special_tokens=False)
            taken = matcher.deep_copy().validate_tokens(tokens)
            assert (taken == len(tokens)) is is_good, (notation, text, words.tokenizer.decode(tokens[:taken]))


@pytest.mark.parametrize("notation", ["hermes", "qwen3_coder", "lfm2", "gemma4"])
@pytest.mark.parametrize("definition", [PATCH, SUM])
def test_whatever_is_drawn_the_input_follows_its_grammar(words: Vocabulary, notation: str, definition: str) -> None:
    rng = random.Random(f"{SEED} {notation} {definition}")
    print(f"seed {SEED}")
    tools = tools_of(definition)
    rules = CallRules(notation, ["apply_patch"], is_required=True, is_parallel=False)
    grammar = answer_grammar(GrammarBuilder(words), None, rules, tools, None)
    assert grammar is not None
    template = words.compiler.compile(grammar.text)
    oracle = words.compiler.compile(json.dumps({"grammars": [{"lark_grammar": definition}]}))
    ends = [words.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("\n", "\\", "n", "*", '"', ")", "}")]
    num_whole = 0
    for _ in range(scaled(10)):
        matcher, tokens = template.deep_copy(), list[int]()
        while len(tokens) < 1500 and not matcher.is_stopped():
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            assert not matcher.is_error(), matcher.get_error()
            wanted = [token for token in ends if mask[token]]
            token = rng.choice(wanted) if wanted and rng.random() < 0.6 else int(rng.choice(np.flatnonzero(mask)))
            assert matcher.consume_token(token)
            tokens.append(token)
        if not matcher.is_stopped():
            continue  # it goes on for long
        shown = [token for token in tokens if token != words.eos]
        text = words.tokenizer.decode(shown, skip_special_tokens=False)
        parser = NOTATIONS[notation].parser([read_tool(tool) for tool in tools])
        events = [*parser.feed(text), *parser.finish()]
        given = custom_input("".join(event.text for event in events if isinstance(event, CallArguments)))
        # What is ignored may stand before all else in Lark, and not in llguidance's.
        given = given.lstrip() if "%ignore" in definition else given
        spelled = words.tokenizer.encode(given, add_special_tokens=False)
        matcher = oracle.deep_copy()
        assert matcher.validate_tokens(spelled) == len(spelled), given
        assert matcher.consume_tokens(spelled)
        assert matcher.is_accepting()
        num_whole += 1
    assert num_whole or scaled(10) < 10


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ("start: a", "no rule a"),
        ("start: start", "nothing matches the rule start"),
        ("start", "':' was expected"),
        ("start: x{y}", "not Lark"),
        ("%declare A\nstart: A", "%declare is not supported"),
        ("%import other.A\nstart: A", "only terminals of common"),
        ("%import common.NOTHING\nstart: NOTHING", "common.NOTHING is not known"),
        ("start: " + "(" * 300, "nested too deep"),
        ("start: a a a a\na: b b b b\nb: c c c c\nc: d d d d\nd: e e e e\ne: f f f f\nf: /[a-z]+[0-9]/ | start", "too"),
    ],
)
def test_a_grammar_that_is_no_expression_is_refused(definition: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        tools_of(definition)


def test_a_grammar_that_calls_itself_is_unrolled() -> None:
    words_of = lark_regex('start: "a" | "[" start ("," start)* "]"', "format")
    for text, fits in (("a", True), ("[a,[a]]", True), ("[[[[[a]]]]]", True), ("[a", False), ("[[[[[[a]]]]]]", False)):
        assert bool(re.fullmatch(words_of, text)) is fits, text


def test_a_regular_expression_is_kept_too() -> None:
    (function,) = tools_of("[a-z]+|[0-9]+", "regex")
    assert function["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+|[0-9]+)$"
