"""Rows with a grammar and drafts: each sample is drawn under the mask behind the drafts before it, and matchers follow.

The oracle is a matcher that consumes one token after the other. Drafts are good up to a lie that is anywhere.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.eventually import patience
from tests.model.structured.test_masks import VOCAB_SIZE, asked, grammar_text
from tests.seeding import seed_for
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.model.sampling.bitmask import TokenBitmask, clear_bits_by_bytes
from tokenmill.model.sampling.grammar_rows import GrammarRows, GrammarStep
from tokenmill.model.sampling.row_grammar import MaskThreads
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer
from tokenmill.platform.host_arrays import HostArrays
from tokenmill.serving.frontend.tokenizer import Tokenizer

SEED = seed_for(__name__)
EOS = tuple(sorted(eos_token_ids(demo_model_path())))
PROMPT = [5, 6, 7]
NUM_STEPS = 12
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 40}]


@pytest.fixture(scope="module")
def templates() -> dict[str, Any]:
    """Compiled grammars by their text."""
    print(f"seed {SEED}")
    folder, rng = demo_model_path(), random.Random(SEED)
    tokenizer = Tokenizer.load(folder)
    compiler = GrammarCompiler(GrammarTokenizer(str(folder / "tokenizer.json"), VOCAB_SIZE, EOS))
    cases = rng.sample(asked(rng), 20)
    texts = [grammar_text(tokenizer, *case) for case in cases]
    return {text: compiler.compile(text) for text in texts}


@pytest.fixture(params=[False, True], ids=["device", "host"])
def rows(request: pytest.FixtureRequest, templates: dict[str, Any]) -> Iterator[GrammarRows]:
    rows = GrammarRows(templates.get, VOCAB_SIZE, on_host=request.param, proposes=True)
    yield rows
    rows.close()


def flags_of(mask: TokenBitmask | None) -> dict[int, np.ndarray]:
    """By the index of the sample, which tokens its mask has."""
    if mask is None:
        return {}
    flags = ~clear_bits_by_bytes(mask.bits, VOCAB_SIZE)
    return dict(zip(mask.indices.tolist(), flags, strict=True))


class Sequence:
    """One request: what it has brought, and the oracle that has consumed it."""

    def __init__(self, row: int, text: str, template: Any, rng: random.Random) -> None:
        self.row = row
        self.rng = rng
        self.matcher = template.deep_copy()
        self.output: list[int] = []
        self.stop_ids = (*EOS, *(rng.randrange(400) for _ in range(rng.choice([0, 0, 30]))))
        params = SamplingParams(**rng.choice(KINDS), min_tokens=rng.choice([0, 0, 6]), grammar=Grammar(text, "x"))
        self.min_tokens = params.min_tokens
        self.new_row = AdmittedRequest(row, str(row), np.array(PROMPT, np.int32), 3, params, self.stop_ids, 0)
        self.proposal: list[int] = []
        self.is_done = False

    def mask(self, matcher: Any, num_out: int) -> np.ndarray:
        """[V], what the rule leaves where `num_out` tokens are out."""
        bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), dtype=np.uint8)
        flags = np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little").astype(bool)
        if num_out < self.min_tokens:
            without = flags.copy()
            without[list(self.stop_ids)] = False
            flags = without if without.any() else flags
        return flags

    def drafts(self) -> list[int]:
        """Tokens that the grammar allows, up to a lie; or what the step before has proposed."""
        if self.rng.random() < 0.5:
            return self.proposal[:4]
        drafts, matcher = list[int](), self.matcher.deep_copy()
        for _ in range(self.rng.randint(0, 4)):
            drafts.append(self.any_of(self.mask(matcher, len(self.output) + len(drafts))))
            if self.rng.random() < 0.2:
                drafts[-1] = self.rng.randrange(VOCAB_SIZE)
            if not matcher.try_consume_tokens(drafts[-1:]):
                break
        return [*drafts, *(self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(0, 2)))]

    def any_of(self, flags: np.ndarray) -> int:
        return int(self.rng.choice(np.flatnonzero(flags)))

    def check(self, brought: list[int], drafts: list[int]) -> None:
        """Take in what a step has brought; all of it is due, and allowed where it stands."""
        assert brought
        assert brought[:-1] == drafts[: len(brought) - 1]
        for token in brought:
            assert not self.is_done, "behind the end"
            assert self.mask(self.matcher, len(self.output))[token]
            self.output.append(token)
            self.is_done = token in self.stop_ids
            assert self.is_done or self.matcher.consume_token(token)


def draw(step: GrammarStep, sequences: list[Sequence], drafts: list[list[int]], rng: random.Random) -> np.ndarray:
    """[S]: what a model that often agrees with drafts would sample, under the masks as they are offered."""
    owners = [(one, own, number) for one, own in zip(sequences, drafts, strict=True) for number in range(1 + len(own))]
    token_ids = np.array([rng.randrange(VOCAB_SIZE) for _ in owners])
    for index, (one, own, number) in enumerate(owners):
        if rng.random() < 0.8:
            likely = one.any_of(one.mask(one.matcher, len(one.output))) if number == 0 else token_ids[index]
            token_ids[index] = own[number] if number < len(own) else likely
    oracles = [(one.matcher.deep_copy(), len(one.output)) for one in sequences]
    expected: list[np.ndarray | None] = []
    for (matcher, num_out), one, own in zip(oracles, sequences, drafts, strict=True):
        expected.append(one.mask(matcher, num_out))
        for number, draft in enumerate(own, 1):
            is_open = expected[-1] is not None and draft not in one.stop_ids
            is_open = is_open and matcher.try_consume_tokens([draft]) == 1
            expected.append(one.mask(matcher, num_out + number) if is_open else None)
    for is_second, mask in enumerate((step.ready(HostArrays()), None)):
        found = flags_of(step.deciding(token_ids) if is_second else mask)
        for index, flags in found.items():
            want = expected[index]
            assert want is not None and np.array_equal(flags, want), f"seed {SEED}"
            if not flags[token_ids[index]]:
                token_ids[index] = owners[index][0].any_of(flags)
    return token_ids.astype(np.int32)


def test_matchers_follow_what_steps_bring(
    rows: GrammarRows, templates: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr("tokenmill.model.sampling.grammar_rows.PATIENCE", 30.0)
    rng, counts, num_proposed = random.Random(SEED), Counter[int](), 0
    for _ in range(6):
        texts = rng.sample(sorted(templates), 5)
        sequences = [Sequence(row, text, templates[text], rng) for row, text in enumerate(texts)]
        rows.set([one.new_row for one in sequences])
        for _ in range(NUM_STEPS):
            sequences = [one for one in sequences if not one.is_done]
            if not sequences:
                break
            drafts = [one.drafts() for one in sequences]
            columns = [
                (one.row, len(PROMPT) + len(one.output) + number, draft)
                for one, own in zip(sequences, drafts, strict=True)
                for number, draft in enumerate([*own, -1])
            ]
            step = rows.step(*(np.array(column) for column in zip(*columns, strict=True)))
            assert step is not None
            token_ids = draw(step, sequences, drafts, rng)
            assert step.take_samples(token_ids) == {}
            start = 0
            for one, own in zip(sequences, drafts, strict=True):
                samples = token_ids[start : start + 1 + len(own)].tolist()
                brought = [token for token in samples if token >= 0]
                assert samples == [*brought, *[-1] * (len(samples) - len(brought))]
                one.check(brought, own)
                one.proposal = step.proposals.get(start, [])
                if one.proposal and not one.is_done:
                    num_proposed += 1
                    assert one.matcher.validate_tokens(one.proposal) == len(one.proposal)
                    assert not {*one.proposal} & {*one.stop_ids}
                counts[len(brought)] += 1
                start += len(samples)
    assert max(counts) >= 4, counts
    assert num_proposed > 3


def columns_of(one: Sequence, drafts: list[int]) -> list[np.ndarray]:
    """Rows, positions and drafts of one request's samples."""
    first = len(PROMPT) + len(one.output)
    columns = [(one.row, first + number, draft) for number, draft in enumerate([*drafts, -1])]
    return [np.array(column) for column in zip(*columns, strict=True)]


def two_drafts(one: Sequence) -> list[list[int]]:
    """Two tokens behind which other tokens are allowed each; none if there are none."""
    found: dict[bytes, int] = {}
    for token in np.flatnonzero(one.mask(one.matcher, 0)).tolist():
        matcher = one.matcher.deep_copy()
        if token not in one.stop_ids and matcher.try_consume_tokens([token]):
            found.setdefault(one.mask(matcher, 1).tobytes(), token)
    return [[token] for token in found.values()][:2]


def test_masks_that_were_late_are_not_those_behind_the_next_drafts(
    templates: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they have been filled, the row was fast enough to be filled at once in the next step."""
    print(f"seed {SEED}")
    rng, may_go_on, fill = random.Random(SEED), threading.Event(), MaskThreads._fill_ahead

    def held(threads: MaskThreads, drafted: Any, before: Any) -> None:
        assert not before or may_go_on.wait(patience())
        fill(threads, drafted, before)

    monkeypatch.setattr(MaskThreads, "_fill_ahead", held)
    monkeypatch.setattr("tests.model.sampling.test_drafted_masks.KINDS", KINDS[2:])  # under a mask at once
    choices = [Sequence(0, text, templates[text], rng) for text in sorted(templates)]
    one = next(one for one in choices if len(two_drafts(one)) == 2)
    first, second = two_drafts(one)
    rows = GrammarRows(templates.get, VOCAB_SIZE, on_host=True)
    rows.set([one.new_row])
    row = rows._rows[0]
    row.job.result(patience())
    row.is_slow = True
    step = rows.step(*columns_of(one, first))
    assert step is not None and step.ready(HostArrays()) is None
    token_ids = np.array([*first, 0], np.int32)
    assert step.take_samples(token_ids) == {} and token_ids.tolist() == [-1, -1]
    row.is_slow = False
    step = rows.step(*columns_of(one, second))
    may_go_on.set()
    monkeypatch.setattr("tokenmill.model.sampling.grammar_rows.PATIENCE", 30.0)
    assert step is not None
    token_ids = draw(step, [one], [second], rng)
    assert step.take_samples(token_ids) == {}
    one.check([token for token in token_ids.tolist() if token >= 0], second)
    rows.close()
