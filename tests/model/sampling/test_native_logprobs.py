"""The native log probabilities against float64, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tests.model.sampling.oracle import ranked
from tests.model.sampling.test_ranking import logits_with_ties
from tokenmill.model.sampling.logprobs import LOWEST_LOGPROB, LogprobArrays, LogprobGroup, take_logprobs


def taken(isa: str, logits: np.ndarray, tokens: np.ndarray, count: int, threads: int = 1) -> LogprobArrays:
    group = LogprobGroup(np.arange(len(logits)), (count,) * len(logits))
    return take_logprobs(logits, tokens, group, kernels(isa, threads))


def random_rows(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    """Flat rows, and rows where one token has nearly all of the weight, whose log probability is nearly 0."""
    rows = torch.randn(count, vocab_size) * torch.from_numpy(rng.uniform(0.1, 9, (count, 1))).float()
    rows[::2] = rows[::2].bfloat16().float()
    rows[::3, int(rng.integers(vocab_size))] += 20
    rows[1::3] += float(rng.uniform(-1e4, 1e4))
    rows[0, : vocab_size // 3] = -torch.inf
    return rows.numpy()


def exact_logprobs(rows: np.ndarray) -> np.ndarray:
    """Return the log softmax of each row in more digits, where the largest logit itself adds nothing to the sum's rest,
    rounded once."""
    raw = rows.astype(np.longdouble)
    below = raw - raw.max(1, keepdims=True)
    weights = np.exp(below)
    weights[np.arange(len(raw)), raw.argmax(1)] = 0
    return np.maximum(below - np.log1p(weights.sum(1, keepdims=True)), LOWEST_LOGPROB).astype(np.float32)


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 129, 331, 5001])
def test_they_are_those_of_float64_rounded_once(isa: str, vocab_size: int, rng: np.random.Generator) -> None:
    rows = random_rows(rng, 12, vocab_size)
    tokens, count = rng.integers(0, vocab_size, 12), int(rng.integers(1, min(vocab_size, 30) + 1))
    found = taken(isa, rows, tokens, count)
    exact, places = exact_logprobs(rows), np.arange(12)
    # A number between two of float32 may be rounded to the other one, which hardly ever happens.
    for got, want in (
        (found.logprobs, exact[places, tokens]),
        (found.top_logprobs, np.take_along_axis(exact, found.top_ids, 1)),
    ):
        np.testing.assert_array_max_ulp(got, want, maxulp=1)
        assert np.count_nonzero(got != want) <= 1
    for row in places.tolist():
        order = ranked(rows[row].astype(np.float64)).tolist()
        assert found.top_ids[row].tolist() == order[:count]
        assert found.ranks[row] == order.index(tokens[row]) + 1


@every_isa
def test_ranks_and_likely_tokens_are_those_of_torch_where_logits_are_equal(isa: str, rng: np.random.Generator) -> None:
    for vocab_size in (40, 3000):
        rows = logits_with_ties(rng, 4, vocab_size).numpy()
        tokens = rng.integers(0, vocab_size, len(rows))
        group = LogprobGroup(np.arange(len(rows)), (20,) * len(rows))
        want = take_logprobs(rows, tokens, group)
        got = take_logprobs(rows, tokens, group, kernels(isa))
        assert np.array_equal(got.ranks, want.ranks)
        assert np.array_equal(got.top_ids, want.top_ids)


@every_isa
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(isa: str, rng: np.random.Generator) -> None:
    rows, tokens = random_rows(rng, 30, 4099), rng.integers(0, 4099, 30)
    together = taken(isa, rows, tokens, 5, threads=3)
    for row in range(30):
        alone = taken(isa, rows[row : row + 1], tokens[row : row + 1], 5)
        assert np.array_equal(alone.logprobs[0], together.logprobs[row])
        assert np.array_equal(alone.top_logprobs[0], together.top_logprobs[row])


@every_isa
def test_rows_are_taken_by_number_from_wider_memory(isa: str, rng: np.random.Generator) -> None:
    memory = np.full((9, 340), np.nan, dtype=np.float32)
    memory[:, 4:335] = random_rows(rng, 9, 331)
    tokens, indices = rng.integers(0, 331, 9), np.array([7, 2, 4])
    some = take_logprobs(memory[:, 4:335], tokens, LogprobGroup(indices, (3, 3, 3)), kernels(isa))
    every = take_logprobs(memory[:, 4:335], tokens, LogprobGroup(np.arange(9), (3,) * 9), kernels(isa))
    assert np.array_equal(some.logprobs, every.logprobs[indices])
    assert np.array_equal(some.top_ids, every.top_ids[indices])


@every_isa
def test_what_is_no_number_is_told_as_one_row(isa: str) -> None:
    rows = torch.randn(6, 300).numpy()
    rows[1, 7], rows[2, 9], rows[3] = np.nan, np.inf, -np.inf
    rows[4, :299] = -np.inf
    found = taken(isa, rows, np.zeros(6, dtype=np.int64), 2)
    assert np.isnan(found.logprobs).tolist() == [False, True, True, True, False, False]
    assert np.isnan(found.top_logprobs).any(1).tolist() == [False, True, True, True, False, False]
    assert found.logprobs[4] == LOWEST_LOGPROB
    assert found.top_logprobs[4].tolist() == [0.0, LOWEST_LOGPROB]
