"""Answers that are free except in their calls: whatever a model draws, the parser finds calls of the tools alone."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.model.structured.lazy_vocabulary import MARKS, Vocabulary, vocabulary
from tests.seeding import seed_for
from tests.tiers import pairs, scaled
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import CallRules
from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.json_schema import closed
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.reasoning import ReasoningSplitter
from tokenmill.serving.frontend.tokenizer import IncrementalDetokenizer
from tokenmill.serving.frontend.tool_parsers import harmony
from tokenmill.serving.frontend.tool_parsers.protocol import read_tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS, STYLES

SEED = seed_for(__name__)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
MIXED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["text"],
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get": {"parameters": CITY, "strict": True},
    "get_all": {"parameters": MIXED},
    "loose": {"parameters": MIXED, "strict": False},
    "nothing": {},
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": n, **f}} for n, f in FUNCTIONS.items()]
HEADER = "<|channel|>commentary to=functions."
OPENINGS = {
    "hermes": ["<tool_call>"],
    "qwen3_coder": ["<tool_call>"],
    "llama3_json": ["{", " {"],
    "mistral": ["[TOOL_CALLS]"],
    "pythonic": ["[get(", " [loose("],
    "lfm2": ["<|tool_call_start|>"],
    "granite": ["<|tool_call|>", "<tool_call>"],
    "phi4_mini_json": ["<|tool_call|>", "functools"],
    "gemma4": ["<|tool_call>"],
    harmony.NOTATION_NAME: [f"<|start|>assistant{HEADER}", f"{HEADER}get<|message|>"],
}
# So that calls end within the length of an answer.
CLOSERS = [
    '"',
    "}",
    "]",
    '"}',
    "\n",
    "</tool_call>",
    ")",
    "</",
    "parameter",
    "function",
    ">",
    "{",
    "{}",
    "<tool_call|>",
]
MAX_TOKENS = 200
CASES = pairs([name for name in OPENINGS if name != harmony.NOTATION_NAME], ["", "qwen3", "granite", "gemma4"])
CASES += [(harmony.NOTATION_NAME, harmony.STYLE_NAME)]


@pytest.fixture(scope="module", params=[MARKS, []], ids=["marks", "spelled"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"), request.param)


def compiled(words: Vocabulary, notation: str, thinking: Thinking | None) -> Any:
    rules = CallRules(notation, list(FUNCTIONS), is_required=False, is_parallel=True, is_lazy=True)
    grammar = answer_grammar(GrammarBuilder(words), None, rules, TOOLS, thinking)
    assert grammar is not None
    return words.compiler.compile(grammar.text)


def mask_of(words: Vocabulary, matcher: Any) -> Any:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.unpackbits(bits, count=words.size, bitorder="little")


class Model:
    """Draws any token that the mask has; likes to begin calls, as tokens or spelled, and to end them."""

    def __init__(self, words: Vocabulary, notation: str, rng: random.Random) -> None:
        self._words, self._rng = words, rng
        self._encode = lambda text: words.tokenizer.encode(text, add_special_tokens=False)
        self._openings = OPENINGS[notation]
        self._closers = [token for text in CLOSERS for token in self._encode(text)[:1]]
        self._wanted: list[int] = self._opening() if rng.random() < 0.5 else []

    def _opening(self) -> list[int]:
        text = self._rng.choice(self._openings)
        pieces = [text] if self._rng.random() < 0.6 else list(text)
        return [token for piece in pieces for token in self._encode(piece)]

    def draw(self, mask: Any, is_late: bool) -> int:
        rng = self._rng
        if not self._wanted and rng.random() < 0.08:
            self._wanted = self._opening()
        if self._wanted and mask[self._wanted[0]]:
            return self._wanted.pop(0)
        self._wanted = []
        if is_late and mask[self._words.eos] and rng.random() < 0.1:
            return self._words.eos
        closers = [token for token in self._closers if mask[token]]
        return rng.choice(closers) if closers and rng.random() < 0.3 else int(rng.choice(np.flatnonzero(mask)))


def generated(words: Vocabulary, template: Any, model: Model) -> tuple[list[int], bool]:
    """Return the tokens of an answer, and whether it was ended by its length."""
    matcher, tokens = template.deep_copy(), list[int]()
    while len(tokens) < MAX_TOKENS:
        mask = mask_of(words, matcher)
        token = model.draw(mask, len(tokens) > MAX_TOKENS // 3)
        if token == words.eos:
            return tokens, False
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return tokens, True


def pieces_of(
    words: Vocabulary, notation: str, thinking: Thinking | None, tokens: list[int], is_cut: bool, rng: random.Random
) -> list[AnswerPiece]:
    """Read an answer as a text worker does, in deltas of any size."""
    style = harmony.STYLE_NAME if notation == harmony.NOTATION_NAME else ""
    names = [style] if style else [name for name, one in STYLES.items() if thinking and one.end == thinking.end]
    keeps = NOTATIONS[notation].needs_special_tokens or any(STYLES[name].needs_special_tokens for name in names)
    texts = IncrementalDetokenizer(words.tokenizer, skip_special_tokens=not keeps)
    parser: AnswerParser | harmony.HarmonyParser
    if style:
        parser = harmony.HarmonyParser(shows_calls=True, keeps_calls=True)
    else:
        splitter = None if thinking is None else ReasoningSplitter(STYLES[names[0]], thinking.has_begun)
        tools = NOTATIONS[notation].parser([read_tool(tool) for tool in TOOLS])
        parser = AnswerParser(splitter, tools, keeps_calls=True)
    pieces: list[AnswerPiece] = []
    while tokens:
        count = rng.randint(1, 5)
        pieces += parser.feed(texts.push(tokens[:count]), count)
        tokens = tokens[count:]
    return [*pieces, *parser.feed(texts.finish(), 0), *parser.finish(None, is_cut)]


def calls_of(pieces: list[AnswerPiece]) -> list[list[str]]:
    """Return name and arguments of each call."""
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind is PieceKind.CALL and piece.name:
            calls.append([piece.name, ""])
        if piece.kind is PieceKind.CALL:
            calls[-1][1] += piece.text
    return calls


def check_call(name: str, arguments: str) -> None:
    function = FUNCTIONS[name]
    value = json.loads(arguments)
    assert isinstance(value, dict)
    strict = function.get("strict")
    if strict is not False:
        schema = closed({"type": "object", **function.get("parameters", {})}, strict is True)
        jsonschema.validate(value, schema)


@pytest.mark.parametrize(("notation", "style"), CASES)
def test_no_call_is_malformed_whatever_is_drawn(words: Vocabulary, notation: str, style: str) -> None:
    if style == harmony.STYLE_NAME and words.token_id("<|message|>") is None:
        pytest.skip("messages need their marks as tokens")
    rng = random.Random(f"{SEED} {notation} {style}")
    print(f"seed {SEED}")
    num_calls = 0
    for number in range(scaled(20)):
        own = STYLES[style] if style else None
        thinking = None if own is None else Thinking(own.begin, own.end, number % 4 == 3, own.opening)
        template = compiled(words, notation, thinking)
        tokens, is_cut = generated(words, template, Model(words, notation, rng))
        pieces = pieces_of(words, notation, thinking, tokens, is_cut, rng)
        calls = calls_of(pieces)
        whole = calls[:-1] if is_cut else calls  # the last one may have been cut, and its reply says so
        for name, arguments in whole:
            check_call(name, arguments)
        num_calls += len(whole)
    assert num_calls or scaled(20) < 20


@pytest.mark.parametrize("notation", OPENINGS)
def test_free_text_may_be_any_tokens(words: Vocabulary, notation: str) -> None:
    """Parts of characters, special tokens and ids without a token too: it is the text that would come without tools."""
    if notation == harmony.NOTATION_NAME and words.token_id("<|message|>") is None:
        with pytest.raises(InvalidRequest, match="lacks the marks of harmony"):
            compiled(words, notation, None)
        return
    mask = mask_of(words, compiled(words, notation, None).deep_copy())
    refused = np.flatnonzero(mask == 0).tolist()
    texts = [words.tokenizer.token(token) or "" for token in refused]
    expected = {"llama3_json": "{", "pythonic": "["}.get(notation)
    assert all(expected is not None and text.strip("Ġ \n").startswith(expected) for text in texts), texts


@pytest.mark.parametrize(("notation", "opening"), [(name, one) for name in OPENINGS for one in OPENINGS[name]])
def test_behind_an_opening_only_a_call_can_follow(words: Vocabulary, notation: str, opening: str) -> None:
    if notation == harmony.NOTATION_NAME and words.token_id("<|message|>") is None:
        pytest.skip("messages need their marks as tokens")
    for pieces in ([opening], list(opening)):
        if notation == harmony.NOTATION_NAME and len(pieces) > 1:
            continue  # its marks are read as tokens
        matcher = compiled(words, notation, None).deep_copy()
        text = " and " if notation not in ("llama3_json", "pythonic", harmony.NOTATION_NAME) else ""
        tokens = [t for one in [text, *pieces] if one for t in words.tokenizer.encode(one, add_special_tokens=False)]
        if HEADER + "get" in opening:
            assert matcher.validate_tokens(tokens) == len(tokens)
        for token in tokens:
            assert matcher.consume_token(token)
        assert not matcher.is_accepting()
        assert mask_of(words, matcher).sum() < words.size // 4


def test_what_a_limit_cuts_off_a_call_is_no_content() -> None:
    for notation, text in [
        ("hermes", 'Look.<tool_call>\n{"name": "ge'),
        ("hermes", "Look.<tool_"),
        ("mistral", 'Look.[TOOL_CALLS] [{"name"'),
        ("granite", "Look.<|tool_call|>["),
        ("qwen3_coder", "Look.<tool_call>\n<function=g"),
        ("gemma4", 'Look.<|tool_call>call:get{city:<|"|>Os'),
        ("lfm2", "Look.<|tool_call_start|>[get(ci"),
    ]:
        parser = AnswerParser(None, NOTATIONS[notation].parser([]), keeps_calls=True)
        pieces = [*parser.feed(text, 1), *parser.finish(None, is_cut=True)]
        assert "".join(piece.text for piece in pieces if piece.kind is PieceKind.TEXT) == "Look.", (notation, text)


@pytest.mark.parametrize("notation", OPENINGS)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_strict_tool_is_refused_by_the_keyword_that_no_grammar_keeps(
    words: Vocabulary, notation: str, is_lazy: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    rules = CallRules(notation, ["loose", "f"], is_required=not is_lazy, is_parallel=True, is_lazy=is_lazy)

    def compiled_with(is_strict: bool) -> Any:
        functions = [{"name": "loose", "parameters": schema}, {"name": "f", "parameters": schema, "strict": is_strict}]
        tools = [{"type": "function", "function": function} for function in functions]
        grammar = answer_grammar(GrammarBuilder(words), None, rules, tools, None)
        assert grammar is not None
        assert grammar.is_optional == (is_lazy and not is_strict)
        return words.compiler.compile(grammar.text)

    if is_lazy and notation == harmony.NOTATION_NAME and words.token_id("<|channel|>") is None:
        with pytest.raises(InvalidRequest, match="harmony"):
            compiled_with(False)
        return
    compiled_with(False)
    sentence = 'the JSON schema of a strict tool cannot be used: Unimplemented keys: ["uniqueItems"]'
    with pytest.raises(InvalidRequest, match=f"^{re.escape(sentence)}$"):
        compiled_with(True)
