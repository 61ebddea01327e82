"""Parsers of tool calls: calls that are written in each notation come back, however the text is cut, whatever it is."""

from __future__ import annotations

import json
import random
import sys
from types import FrameType
from typing import Any

import pytest

from tests.serving.frontend.written_calls import WRITERS, Call, random_calls
from tests.tiers import pairs
from tokenmill.config.server_settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from tokenmill.core.answer import AnswerPiece, PieceKind, joined
from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.reasoning import ReasoningSplitter
from tokenmill.serving.frontend.tool_parsers.protocol import Tool
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS, STYLES


def read(parser: AnswerParser, deltas: list[str]) -> list[AnswerPiece]:
    return joined(piece for part in [*(parser.feed(delta, 1) for delta in deltas), parser.finish()] for piece in part)


def texts(pieces: list[AnswerPiece], kind: PieceKind = PieceKind.TEXT) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)


def calls_of(pieces: list[AnswerPiece]) -> list[tuple[str | None, str]]:
    return [(piece.name, piece.text) for piece in pieces if piece.kind is PieceKind.CALL]


def cut(rng: random.Random, text: str) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.choice([0, 1, 3, 10, len(text)]))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def tools_of(calls: list[Call]) -> list[Tool]:
    """Functions that take these calls, one each."""

    def typed(arguments: dict[str, Any]) -> dict[str, Any]:
        return {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}

    return [Tool(name, {"properties": typed(arguments)}) for name, arguments in calls]


def answer_parser(notation: str, tools: list[Tool] | None = None) -> AnswerParser:
    return AnswerParser(None, NOTATIONS[notation].parser(tools or ()))


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_every_flag_has_its_parser() -> None:
    # harmony has tests of its own: it is read as a whole.
    assert set(NOTATIONS) == set(TOOL_CALL_PARSERS) == {*WRITERS, "openai"}
    assert set(STYLES) == set(REASONING_PARSERS)


@pytest.mark.parametrize("notation", WRITERS)
def test_calls_come_back_however_the_text_is_cut(notation: str, rng: random.Random) -> None:
    for _ in range(60):
        calls = [(f"{name}{number}", arguments) for number, (name, arguments) in enumerate(random_calls(rng))]
        text = WRITERS[notation](rng, calls)
        pieces = read(answer_parser(notation, tools_of(calls)), cut(rng, text))
        assert [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)] == calls, text
        assert len(pieces) == len(calls), text


@pytest.mark.parametrize("notation", WRITERS)
def test_any_text_reads_the_same_in_any_pieces(notation: str, rng: random.Random) -> None:
    parts = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        '{"name": "f", ',
        '"arguments": ',
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "functools",
        "<|tool_call>call:f",
        "<tool_call|>",
        '<|"|>',
    ]
    parts += [
        '{"a": 1}',
        "[f(a=1), ",
        "g(",
        ")",
        "]",
        "}",
        '"',
        "\\",
        " ",
        "\n",
        ";",
        ",",
        "text",
        "é",
        "f",
        "'",
        "<",
        "[",
    ]
    for _ in range(150):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 14)))
        if rng.random() < 0.5:
            damaged = list(WRITERS[notation](rng, random_calls(rng)))
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.choice(["", "{", '"', "x", "}", "]", "\\"])
            text = "".join(damaged)
        whole = read(answer_parser(notation), [text])
        assert read(answer_parser(notation), list(text)) == whole, text
        assert read(answer_parser(notation), cut(rng, text)) == whole, text


@pytest.mark.parametrize("notation", WRITERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text",
        "  leading and trailing  \n",
        "1 < 2 and [a list] and {braces}",
        '{"answer": 42}',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "[TOOL_CALLS] nothing of the kind\n",
        "<tool_call>[1, 2]",
        '<|tool_call|> [{"name": 5}] <|/tool_call|>',
        "functools.partial",
        "<|tool_call>call:f{a:b}<tool_call|>",
        "<|tool_call>call:f{a:1",
        "<|tool_call>call:f{a:" + "[" * 50_000 + "<tool_call|>",
        '<|tool_call>call:f{a:<|"|>' + '<|"|' * 10_000 + "<tool_call|>",
        "<tool_call>\n<function=a b>",
        "<tool_call>\n<function=f",
        "<|tool_call_start|>no list<|tool_call_end|>",
        "<|tool_call_start|>",
        "[1, 2, 3]",
        "[f(1, 2)]",
        "[f(a=__import__('os').system('true'))]",
        "[f(**{'a': 1})]",
        "[f(a=b)]",
        "[f(a=" + "-" * 50_000 + "1)]",
        "[f(a=" + "[" * 50_000 + ")]",
        '{"name": "f", "parameters": 5}',
    ],
)
def test_what_is_no_call_is_content(notation: str, text: str) -> None:
    pieces = read(answer_parser(notation), [text])
    assert pieces == ([AnswerPiece(PieceKind.TEXT, text)] if text else [])


def test_text_around_calls_stays_and_the_space_between_goes() -> None:
    text = 'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    pieces = read(answer_parser("hermes"), [text])
    assert pieces == [AnswerPiece(PieceKind.TEXT, "Let me see."), AnswerPiece(PieceKind.CALL, "{}", "f")]


def test_text_after_a_call_comes_after_it() -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {}}</tool_call> and more'
    pieces = read(answer_parser("hermes"), [text])
    assert [(piece.text, piece.name) for piece in pieces] == [("So:", None), ("{}", "f"), (" and more", None)]


@pytest.mark.parametrize("notation", WRITERS)
@pytest.mark.parametrize("keeps_calls", [False, True])
def test_a_mark_within_an_answer_in_json_opens_no_call(notation: str, keeps_calls: bool, rng: random.Random) -> None:
    text = '  {"ok": "[TOOL_CALLS]f{} <tool_call> <|tool_call>call:f{}<tool_call|> <|tool_call|>[ [f(a=1)]"} '
    for _ in range(20):
        parser = AnswerParser(None, NOTATIONS[notation].parser(), keeps_calls=keeps_calls, is_either=True)
        pieces = read(parser, cut(rng, text))
        assert [(piece.kind, piece.text) for piece in pieces] == [(PieceKind.TEXT, text)]


@pytest.mark.parametrize("notation", WRITERS)
def test_calls_are_read_where_an_answer_may_be_either(notation: str, rng: random.Random) -> None:
    for _ in range(20):
        calls = [(f"{name}{number}", arguments) for number, (name, arguments) in enumerate(random_calls(rng))]
        text = WRITERS[notation](rng, calls)
        parser = AnswerParser(None, NOTATIONS[notation].parser(tools_of(calls)), is_either=True)
        found = calls_of(read(parser, cut(rng, text)))
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, text


def test_arguments_stream_as_they_come() -> None:
    parser = answer_parser("hermes")
    assert not parser.feed('<tool_call>\n{"name": "f", "argu', 1)
    assert parser.feed('ments": {"city": "U', 1) == [AnswerPiece(PieceKind.CALL, '{"city": "U', "f")]
    assert parser.feed('lm"}', 1) == [AnswerPiece(PieceKind.CALL, 'lm"}')]
    assert not parser.feed("}\n</tool_call>", 1)
    assert not parser.finish()


def test_texts_stream_between_tags_and_other_values_are_what_the_schema_says() -> None:
    schema = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": ["string", "null"]}, "wet": {}}
    parser = answer_parser("qwen3_coder", [Tool("f", {"properties": schema})])
    assert parser.feed('<tool_call>\n<function=f>\n<parameter=city>\nU"', 1) == [
        AnswerPiece(PieceKind.CALL, '{"city": "U\\"', "f")
    ]
    assert parser.feed("lm\n", 1) == [AnswerPiece(PieceKind.CALL, "lm")]
    rest = "</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n"
    rest += "<parameter=wet>\nTrue\n</parameter>\n<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>"
    assert parser.feed(rest, 1) == [
        AnswerPiece(PieceKind.CALL, '", "days": 2, "unit": null, "wet": true, "other": "5"}')
    ]


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    pieces = read(answer_parser("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": "so f'])
    assert calls_of(pieces) == [("f", '{"a": "so f')]


def test_further_calls_are_dropped_where_one_is_wanted(rng: random.Random) -> None:
    text = WRITERS["hermes"](rng, [("one", {}), ("two", {"a": 1})])
    pieces = read(AnswerParser(None, NOTATIONS["hermes"].parser(), max_calls=1), cut(rng, text))
    assert pieces == [AnswerPiece(PieceKind.CALL, "{}", "one")]


BEGINNINGS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', "<", '<tool_call>{"a": "'],
    "llama3_json": ["", '{"name": "f", "parameters": {"a": "', '{"x": "', "<|python"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "', "[TOOL_CALLS]f[ARGS]{", "["],
    "pythonic": ["[", "[f(", '[f(a="', "[f("],
    "qwen3_coder": ["<tool_call>", "<tool_call><function=", "<tool_call><function=f><parameter=a>", "<"],
    "lfm2": ["<|tool_call_start|>", '<|tool_call_start|>[f(a="', "<|"],
    "granite": ["<|tool_call|>", "<|tool_call|>[", '<|tool_call|>[{"name": "f", "arguments": {"a": "', "<"],
    "gemma4": ["<|tool_call>", '<|tool_call>call:f{a:<|"|>', "<"],
    "phi4_mini_json": ["functools", "functools[", 'functools[{"x": "', "<|tool_call|>[{}]"],
}
FILLERS = [" ", "<", "[", "{", "a", '"', "\\", "<tool_call>", "[f(", ";", "\n"]


def work(notation: str, beginning: str, filler: str, count: int) -> int:
    """Calls of functions while a text is read character by character; no string that is read again may grow."""
    parser = NOTATIONS[notation].parser()
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    text = beginning + filler * count
    sys.setprofile(note)
    try:
        for character in text:
            parser.feed(character)
    finally:
        sys.setprofile(None)
    for holder in (parser, *vars(parser).values()):
        held = [value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, str)]
        assert all(len(value) < 1024 for value in held), f"{notation} reads {max(map(len, held))} characters again"
    return calls


@pytest.mark.parametrize(("notation", "filler"), pairs([*BEGINNINGS], FILLERS))
def test_the_work_is_linear_in_the_text(notation: str, filler: str) -> None:
    for beginning in BEGINNINGS[notation]:
        once, twice = work(notation, beginning, filler, 1000), work(notation, beginning, filler, 2000)
        assert twice < 2.3 * once + 1000, (beginning, once, twice)


# --- thinking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "has_begun", "text", "reasoning", "content"),
    [
        ("qwen3", False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("qwen3", False, "yes <think> no", "", "yes <think> no"),
        ("qwen3", False, "  yes", "", "  yes"),
        ("qwen3", False, "<think>\n\n</think>\n\nyes ", "", "yes "),
        ("qwen3", True, "\nhm </thin \n</think>yes", "hm </thin", "yes"),
        ("qwen3", True, "<think>hm</think>yes</think>", "hm", "yes</think>"),
        ("qwen3", False, "<think>never ends", "never ends", ""),
        ("qwen3", False, "<thi", "", "<thi"),
        ("granite", False, "Here is my thought process: hm Here is my response: yes", "hm", "yes"),
        ("gemma4", False, "<|channel>thought\nhm\n<channel|>yes", "hm", "yes"),
        ("gemma4", False, "yes", "", "yes"),
        ("deepseek_r1", True, "hm\n\nso</think>\n\nyes", "hm\n\nso", "yes"),
        ("deepseek_r1", True, "<thi", "<thi", ""),
        ("deepseek_r1", True, "", "", ""),
    ],
)
def test_thinking_is_split_off(
    style: str, has_begun: bool, text: str, reasoning: str, content: str, rng: random.Random
) -> None:
    for deltas in ([text], list(text), cut(rng, text)):
        pieces = read(AnswerParser(ReasoningSplitter(STYLES[style], has_begun)), deltas)
        assert (texts(pieces, PieceKind.REASONING), texts(pieces)) == (reasoning, content)


def test_thinking_comes_before_calls() -> None:
    text = '<think>call <tool_call>?</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = AnswerParser(ReasoningSplitter(STYLES["qwen3"], False), NOTATIONS["hermes"].parser())
    assert read(parser, list(text)) == [
        AnswerPiece(PieceKind.REASONING, "call <tool_call>?"),
        AnswerPiece(PieceKind.CALL, "{}", "f"),
    ]


def test_thinking_may_be_begun_by_the_prompt() -> None:
    assert STYLES["qwen3"].has_begun("<|im_start|>assistant\n<think>\n", is_off=True) is True
    assert STYLES["qwen3"].has_begun("<|im_start|>assistant\n") is False
    assert STYLES["qwen3"].has_begun("<think>\n\n</think>\n\n") is None
    assert STYLES["qwen3"].has_begun("<|im_start|>assistant\n", is_off=True) is None
    assert STYLES["deepseek_r1"].has_begun("<assistant>") is True
    assert STYLES["deepseek_r1"].has_begun("<assistant>", is_off=True) is None
    assert STYLES["deepseek_r1"].has_begun("<assistant></think>") is None
    assert STYLES["openai_gptoss"].has_begun("<|end|><|start|>assistant") is False
