"""The reasoning tokens of usage, however the text of an answer is cut into deltas."""

import itertools
import random

import pytest

from tokenmill.serving.frontend.answer_parser import AnswerParser
from tokenmill.serving.frontend.reasoning import ReasoningSplitter
from tokenmill.serving.frontend.tool_parsers.select import STYLES

QWEN = STYLES["qwen3"]


def count(deltas, has_begun=False, style=QWEN) -> int:
    """Of an answer whose every delta is one token."""
    parser = AnswerParser(ReasoningSplitter(style, has_begun))
    for delta in deltas:
        parser.feed(delta, 1)
    return parser.num_reasoning_tokens


@pytest.mark.parametrize(
    ("deltas", "has_begun", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c"], False, 4),
        (["<thi", "nk>", "a", "</th", "ink>", "c", "d"], False, 5),
        (["a", "b", "</think>", "c"], True, 3),
        (["", "<think>", "a"], False, 3),
        (["x", "<think>", "a", "</think>"], False, 0),
        (["<thi", "s is no mark"], False, 0),
        (["a", "b"], False, 0),
        (["a", "b"], True, 2),
        ([], True, 0),
    ],
)
def test_tokens_up_to_the_closing_mark_are_thinking(deltas, has_begun, expected):
    assert count(deltas, has_begun) == expected


def test_the_marks_are_found_wherever_the_text_is_cut():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = "<think>so " + "<thin </thin " * 20 + "</think> and the answer </think>"
    end = text.index("</think>") + len("</think>")
    for _ in range(50):
        cuts = sorted({0, len(text), *rng.sample(range(len(text)), 30)})
        deltas = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        assert count(deltas) == sum(start < end for start in cuts[:-1])
