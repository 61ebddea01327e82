"""The draws in torch against the definition: uniforms in the middle of each token's interval of the exact CDF."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.sampling.oracle import distribution, draws_of, has_close_call, ranked
from tests.model.sampling.test_ranking import logits_with_ties
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.draws import NO_TOKEN
from tokenmill.model.sampling.reference import draw

NEARLY_ONE = 1.0 - 2.0**-53


def random_logits(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    logits = (rng.normal(size=vocab_size) * rng.uniform(0.2, 6.0)).astype(np.float32)
    if rng.random() < 0.5:  # Ties, as a bfloat16 model has them.
        logits = torch.from_numpy(logits).to(torch.bfloat16).to(torch.float32).numpy()
    return logits


def random_filters(rng: np.random.Generator, vocab_size: int, max_top_k: int) -> SamplingParams:
    """Parameters with at least one filter."""
    use = rng.integers(1, 8)
    return SamplingParams(
        temperature=float(rng.uniform(0.05, 2.0)),
        top_k=int(rng.integers(2, max_top_k + 1)) if use & 1 and 2 <= max_top_k < vocab_size else 0,
        top_p=float(rng.uniform(0.01, 1.0)) if use & 2 or use == 1 else 1.0,
        min_p=float(rng.choice([1e-9, 1e-3, 0.05, 0.5, 1.0])) if use & 4 else 0.0,
    )


def middles(probabilities: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a distribution and, for each, the uniform number in the middle of its interval of the CDF."""
    cumulative = np.cumsum(probabilities[order])
    keep = probabilities[order] > 4e-6  # Narrower intervals are within the rounding of float32 weights.
    return order[keep], (cumulative - probabilities[order] / 2)[keep]


def drawn(logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray) -> list[int]:
    """One token for each uniform number, from the same logits."""
    rows = torch.from_numpy(logits).expand(len(uniforms), -1).contiguous()
    return draw(rows, torch.from_numpy(draws_of(params, len(logits), uniforms))).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 127, 128, 129, 1000, 4099])
def test_unfiltered_draw_is_the_inverse_of_the_cdf_in_order_of_ids(vocab_size, rng):
    logits = random_logits(rng, vocab_size)
    params = SamplingParams(temperature=float(rng.uniform(0.05, 2.0)))
    tokens, uniforms = middles(distribution(logits.astype(np.float64), params), np.arange(vocab_size))
    assert drawn(logits, params, uniforms) == tokens.tolist()


@pytest.mark.parametrize("vocab_size", [2, 50, 256, 257, 300, 4099])
@pytest.mark.parametrize("largest_top_k", [256, 10_000])
@pytest.mark.parametrize("repeat", range(6))
def test_filtered_draw_is_the_inverse_of_the_exact_cdf(vocab_size, largest_top_k, repeat, rng):
    logits, params = random_logits(rng, vocab_size), random_filters(rng, vocab_size, min(largest_top_k, vocab_size - 1))
    if has_close_call(logits.astype(np.float64), params):
        return
    probabilities = distribution(logits.astype(np.float64), params)
    order = ranked(logits.astype(np.float64))
    tokens, uniforms = middles(probabilities, order)
    chosen = rng.permutation(len(tokens))[:60]
    support = order[probabilities[order] > 0]
    pairs = [*zip(tokens[chosen].tolist(), uniforms[chosen], strict=True), (int(support[0]), 0.0)]
    # The last of a support with a tail below the resolution of the uniform need not be its last token.
    if probabilities[support[-1]] > 1e-12:
        pairs.append((int(support[-1]), NEARLY_ONE))
    assert drawn(logits, params, np.array([uniform for _, uniform in pairs])) == [token for token, _ in pairs]


@pytest.mark.parametrize("vocab_size", [1, 2, 2047, 2048, 2049, 5003, 151_936])
def test_greedy_draw_is_torch_argmax_where_that_is_a_number(vocab_size, rng):
    logits = logits_with_ties(rng, 4, vocab_size)
    logits[1] = -torch.inf
    logits[2, rng.integers(vocab_size, size=3)] = torch.nan
    logits[3] = 0.25
    ids = logits.argmax(-1)
    greedy = draws_of(SamplingParams(temperature=0.0), vocab_size, np.zeros(4))
    assert draw(logits, torch.from_numpy(greedy)).tolist() == [ids[0], NO_TOKEN, NO_TOKEN, ids[3]]


def test_a_token_without_weight_is_never_drawn():
    logits = np.full(1000, -3.0e38, dtype=np.float32)
    logits[500] = 1.0
    for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=900)):
        assert drawn(logits, params, np.array([0.0, NEARLY_ONE])) == [500, 500]


def test_a_tail_of_many_unlikely_tokens_keeps_its_weight():
    # 100,000 tokens of 1e-7 each: a float32 cumulative sum past 1.0 would lose most of this one percent.
    logits = np.full(100_001, np.log(1e-7), dtype=np.float32)
    logits[0] = 0.0
    tokens = np.array(drawn(logits, SamplingParams(), np.linspace(0.0, NEARLY_ONE, 401)))
    assert int((tokens > 0).sum()) == pytest.approx(401 * 0.01 / 1.01, abs=1.5)
    assert tokens[-1] == 100_000


def test_min_p_of_one_leaves_every_token_that_ties_with_the_largest():
    logits = np.zeros(300, dtype=np.float32)
    logits[5] = logits[200] = 2.0
    assert drawn(logits, SamplingParams(min_p=1.0), np.linspace(0.0, NEARLY_ONE, 100)) == [5] * 50 + [200] * 50


def test_rows_of_all_kinds_draw_as_they_do_alone(rng):
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.7)] * 5
    logits, uniforms = torch.randn(20, 3000), rng.random(20)
    each = [draws_of(one, 3000, uniforms[row : row + 1]) for row, one in enumerate(params)]
    draws = torch.from_numpy(np.concatenate(each))
    alone = [draw(logits[row : row + 1], draws[row : row + 1]).item() for row in range(20)]
    assert draw(logits, draws).tolist() == alone
