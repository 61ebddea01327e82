"""Masks have the tokens that their matchers take, and no others: a draw may ask either."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.model.structured.schemas import random_schema
from tests.seeding import seed_for
from tests.tiers import scaled
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.messages import CallRules
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.demo import demo_model_path
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, Thinking
from tokenmill.serving.frontend.prompt_processor import answer_grammar
from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS

SEED = seed_for(__name__)
MAX_TOKENS = 16
# The demo model's, and a few ids that no token has, as models have that are padded.
VOCAB_SIZE = 2560 + 7
REGEXES = ["([a-z]{3,5} ){30}", r"[ab]{3}-\d{2}", "a*", "ab", "é+\\n?", "(GET|POST) /[a-z]{1,5}"]
LARK = ['start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]?/\n', 'start: "the quick brown fox"+']


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_model_path())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    folder = demo_model_path()
    return GrammarCompiler(
        GrammarTokenizer(str(folder / "tokenizer.json"), VOCAB_SIZE, tuple(sorted(eos_token_ids(folder))))
    )


def asked(rng: random.Random) -> list[tuple[StructuredOutputs | None, str | None, bool]]:
    """Answers, notations of calls and thinking in many mixtures."""
    answers: list[dict[str, Any]] = [
        *({"json": random_schema(rng)} for _ in range(scaled(12))),
        *({"regex": regex} for regex in REGEXES),
        *({"grammar": grammar} for grammar in LARK),
        {"json_object": True},
        {"choice": ('a"b', "line\nbreak", "<|im_end|>", "one", "only")},
    ]
    plain = [(StructuredOutputs(**answer), None, rng.random() < 0.2) for answer in answers]
    calls = [(None, notation, rng.random() < 0.5) for notation in NOTATIONS]
    both = [(StructuredOutputs(json=random_schema(rng)), notation, False) for notation in NOTATIONS]
    return [*plain, *calls, *both]


def grammar_text(tokenizer: Tokenizer, outputs: StructuredOutputs | None, notation: str | None, thinks: bool) -> str:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look_up", "look")]
    calls = None if notation is None else CallRules(notation, ["look_up", "look"], outputs is None, True)
    thinking = Thinking("<think>", "</think>", False) if thinks else None
    grammar = answer_grammar(GrammarBuilder(tokenizer), outputs, calls, tools, thinking)
    assert grammar is not None
    return grammar.text


def test_a_mask_has_what_the_matcher_takes_in_any_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    num_states = num_ends = 0
    for outputs, notation, thinks in asked(rng):
        matcher = compiler.compile(grammar_text(tokenizer, outputs, notation, thinks)).deep_copy()
        taken: list[int] = []
        for _ in range(MAX_TOKENS):
            untouched = matcher.deep_copy()
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little")
            assert not matcher.is_error(), matcher.get_error()
            if matcher.is_stopped():  # the end is all that is left, and is not offered to the matcher
                num_ends += 1
                break
            # To have filled a mask changes nothing of what is taken.
            for asked_one in (untouched, matcher):
                takes = [asked_one.validate_tokens([token]) for token in range(VOCAB_SIZE)]
                differing = np.flatnonzero(np.array(takes) != mask).tolist()
                assert not differing, (outputs, notation, tokenizer.decode(taken), differing)
            num_states += 1
            taken.append(int(rng.choice(np.flatnonzero(mask))))
            assert matcher.consume_token(taken[-1])
    assert num_states > 300
    assert num_ends > 5
