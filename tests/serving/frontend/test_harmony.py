"""harmony: messages come back as thinking, text and calls however the text is cut; grammars hold in their channel."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from tests.checkpoints import make_tokenizer
from tests.serving.frontend.test_text_processor import ready
from tokenmill.core.answer import AnswerPiece, PieceKind, joined
from tokenmill.core.messages import AddRequest, CallRules, GenerateText, StepOutputs, TextOutputs, TokenOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.text_processor import TextProcessor
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.tool_parsers.harmony import STYLE, HarmonyParser

TEXT, REASONING, CALL = PieceKind.TEXT, PieceKind.REASONING, PieceKind.CALL
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def read(
    text: str, rng: random.Random, shows_calls: bool = True, most: int | None = None, keeps_calls: bool = False
) -> list[AnswerPiece]:
    parser, pieces = HarmonyParser(shows_calls, most, keeps_calls), []
    while text:
        length = rng.choice([1, 2, 3, 9, 40, len(text)])
        pieces += parser.feed(text[:length], 1)
        text = text[length:]
    return joined([*pieces, *parser.finish()])


def call(name: str, arguments: str, spelling: str = "{channel}commentary to=functions.{name} <|constrain|>json") -> str:
    return spelling.format(channel="<|channel|>", name=name) + f"<|message|>{arguments}<|call|>"


CASES = {
    "thinking, then an answer": (
        f"{ANALYSIS}Let me see.{NEXT}{FINAL}It is 4.",
        [AnswerPiece(REASONING, "Let me see."), AnswerPiece(TEXT, "It is 4.")],
    ),
    "an answer at once": (f"{FINAL}Hi!<|return|>", [AnswerPiece(TEXT, "Hi!")]),
    "thinking twice": (
        f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}Done",
        [AnswerPiece(REASONING, "One.\nTwo."), AnswerPiece(TEXT, "Done")],
    ),
    "a word before a call": (
        f"{ANALYSIS}Hm{NEXT}<|channel|>commentary<|message|>I look it up.{NEXT}" + call("look_up", '{"a": "<|end"}'),
        [
            AnswerPiece(REASONING, "Hm"),
            AnswerPiece(TEXT, "I look it up."),
            AnswerPiece(CALL, '{"a": "<|end"}', "look_up"),
        ],
    ),
    "the recipient first": (
        call("f", '{"b": 1}', " to=functions.{name}{channel}commentary json"),
        [AnswerPiece(CALL, '{"b": 1}', "f")],
    ),
    "a call without arguments": (call("f", ""), [AnswerPiece(CALL, "{}", "f")]),
    "cut off within a header": (f"{ANALYSIS}Hm{NEXT}<|channel|>fin", [AnswerPiece(REASONING, "Hm")]),
    "cut off within a mark": (f"{FINAL}1 < 2 and <|en", [AnswerPiece(TEXT, "1 < 2 and <|en")]),
    "another recipient": ("<|channel|>analysis to=python<|message|>1+1<|call|>", [AnswerPiece(REASONING, "1+1")]),
    "no format at all": ("Hello there, 1 < 2", [AnswerPiece(TEXT, "Hello there, 1 < 2")]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("case", CASES)
def test_messages_come_back_however_the_text_is_cut(case: str) -> None:
    text, expected = CASES[case]
    rng = seeded()
    for _ in range(30):
        assert read(text, rng) == expected


def test_random_messages_come_back() -> None:
    rng = seeded()
    for _ in range(200):
        written, expected = [], []
        for _ in range(rng.randint(1, 4)):
            body = "".join(rng.choices(string.ascii_letters + " <|>\n{}", k=rng.randint(1, 30))).strip() or "x"
            kind = rng.choice([REASONING, TEXT, CALL])
            if kind is CALL:
                body = json.dumps({"x": body})
                written.append(call("f", body).removesuffix("<|call|>"))
                expected.append(AnswerPiece(CALL, body, "f"))
            else:
                written.append((ANALYSIS if kind is REASONING else FINAL) + body)
                is_first = not any(piece.kind is kind for piece in expected)
                expected.append(AnswerPiece(kind, body if is_first else "\n" + body))
        assert read(NEXT.join(written), rng) == joined(expected)


def test_calls_beyond_the_most_and_calls_that_nobody_wants() -> None:
    rng, text = seeded(), call("f", "{}") + "<|start|>assistant" + call("g", "{}")
    assert read(text, rng, most=1) == [AnswerPiece(CALL, "{}", "f")]
    assert read(text, rng, shows_calls=False) == [AnswerPiece(TEXT, "{}\n{}")]


@pytest.mark.parametrize("gap", ["", "\n", " \n "])
@pytest.mark.parametrize("rest", ["<", "<|call", "<|start|>", "<|start|>assist"])
def test_arguments_end_where_their_json_does(gap: str, rest: str) -> None:
    rng = seeded()
    text = call("f", gap + '{\n"a": "<|end|>"\n}').removesuffix("<|call|>") + rest
    for _ in range(10):
        found = read(text, rng, keeps_calls=True)
        assert found[0] == AnswerPiece(CALL, '{\n"a": "<|end|>"\n}', "f")
        assert all(piece.kind is TEXT for piece in found[1:])


def test_tokens_of_thinking_are_counted_with_their_marks() -> None:
    parser = HarmonyParser(True)
    for piece in ("<|channel|>", "analysis", "<|message|>", "Let", " me", "<|end|>"):
        parser.feed(piece, 1)
    assert parser.num_reasoning_tokens == 6
    for piece in ("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "4"):
        parser.feed(piece, 1)
    assert parser.num_reasoning_tokens == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has harmony's marks."""
    folder = tmp_path_factory.mktemp("harmony")
    make_tokenizer(folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (f"{FINAL}42", True),
        (f"{ANALYSIS}I think: 7 <or> 8{NEXT}{FINAL}42", True),
        ("42", False),
        (f"{FINAL}forty-two", False),
        (f"{ANALYSIS}42{NEXT}42", False),
    ],
)
def test_grammars_hold_in_the_final_channel(text: str, is_right: bool, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    thinking = Thinking(STYLE.begin, STYLE.end, False, STYLE.opening)
    grammar = answer_grammar(GrammarBuilder(tokenizer), StructuredOutputs(regex="[0-9]+"), None, None, thinking)
    assert grammar is not None
    assert accepts(folder, tokenizer, grammar.text, text) is is_right


def accepts(folder: Path, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    backend = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=[tokenizer.token_id("<|return|>") or 0])
    matcher = LLMatcher(backend, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_call_that_is_required_is_written_in_harmony(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    thinking = Thinking(STYLE.begin, STYLE.end, False, STYLE.opening)
    rules = CallRules(parser="openai", names=["add"], is_required=True, is_parallel=False)
    grammar = answer_grammar(GrammarBuilder(tokenizer), None, rules, [TOOL], thinking)
    assert grammar is not None
    right = call("add", '{"a": 1}').removesuffix("<|call|>")
    for text in (right, f"{ANALYSIS}Hm{NEXT}{right}"):
        assert accepts(folder, tokenizer, grammar.text, text)
        assert read(text, seeded())[-1] == AnswerPiece(CALL, '{"a": 1}', "add")
    for text in (f"{FINAL}1", right.replace("add", "sub"), right.replace("1}", '"1"}')):
        assert not accepts(folder, tokenizer, grammar.text, text)


def test_a_text_worker_takes_an_answer_apart(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    processor = TextProcessor(tokenizer, None, eos_token_ids=frozenset({tokenizer.token_id("<|return|>") or 0}))
    processor.process(ready(vocab_size=400))
    message = GenerateText(ids=["a"], text="2 + 2", params=SamplingParams(max_tokens=50), reasoning="openai_gptoss")
    (request,) = processor.process(message).to_engine
    assert isinstance(request, AddRequest)
    assert request.params.skip_special_tokens is False
    token_ids = tokenizer.encode(f"{ANALYSIS}Easy.{NEXT}{FINAL}4<|return|>", add_special_tokens=False)
    pieces: list[AnswerPiece] = []
    for at, token_id in enumerate(token_ids):
        is_last = at == len(token_ids) - 1
        ending = {"finish_reason": FinishReason.STOP, "stop_reason": token_id} if is_last else {}
        (outputs,) = processor.process(StepOutputs(at, [TokenOutput("a", [token_id], **ending)])).to_api
        assert isinstance(outputs, TextOutputs)
        pieces += outputs.outputs[0].answer or []
    assert joined(pieces) == [AnswerPiece(REASONING, "Easy."), AnswerPiece(TEXT, "4")]
    assert outputs.outputs[0].num_reasoning_tokens == len(tokenizer.encode(f"{ANALYSIS}Easy.<|end|>"))
