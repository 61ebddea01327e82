from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sampling.oracle import distribution, has_close_call, ranked
from tokenmill.sampling.batch import DrawGroup
from tokenmill.sampling.draw import draw_filtered, draw_plain
from tokenmill.sampling.wide import WideDraw, draw_wide
from tokenmill.sampling_params import SamplingParams

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


def group_of(params: SamplingParams, vocab_size: int, uniforms: np.ndarray) -> DrawGroup:
    def full(value: float) -> torch.Tensor:
        return torch.full((len(uniforms),), value, dtype=torch.float64)

    return DrawGroup(
        indices=torch.arange(len(uniforms)),
        temperature=full(params.temperature),
        top_k=full(params.top_k if 0 < params.top_k < vocab_size else vocab_size).to(torch.int64),
        top_p=full(params.top_p),
        min_p=full(params.min_p),
        uniform=torch.from_numpy(uniforms),
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 127, 128, 129, 1000, 4099])
def test_plain_draw_is_the_inverse_of_the_cdf_in_order_of_ids(vocab_size, rng):
    logits = random_logits(rng, vocab_size)
    params = SamplingParams(temperature=float(rng.uniform(0.05, 2.0)))
    probabilities = distribution(logits.astype(np.float64), params)
    tokens, uniforms = middles(probabilities, np.arange(vocab_size))
    rows = torch.from_numpy(logits).expand(len(tokens), -1)
    drawn = draw_plain(rows, torch.full((len(tokens),), params.temperature), torch.from_numpy(uniforms))
    assert drawn.tolist() == tokens.tolist()


@pytest.mark.parametrize("vocab_size", [2, 50, 256, 257, 4099])
@pytest.mark.parametrize("repeat", range(6))
def test_filtered_draw_is_the_inverse_of_the_exact_cdf(vocab_size, repeat, rng):
    logits, params = random_logits(rng, vocab_size), random_filters(rng, vocab_size, 256)
    if has_close_call(logits.astype(np.float64), params):
        return
    probabilities = distribution(logits.astype(np.float64), params)
    order = ranked(logits.astype(np.float64))
    tokens, uniforms = middles(probabilities, order)
    support = order[probabilities[order] > 0]
    tokens = np.concatenate([tokens, support[:1], support[-1:]])
    uniforms = np.concatenate([uniforms, [0.0, NEARLY_ONE]])
    rows = torch.from_numpy(logits).expand(len(tokens), -1).contiguous()
    group = group_of(params, vocab_size, uniforms)
    drawn, is_complete = draw_filtered(rows, group, within_candidates=False)
    assert is_complete.all() or not is_complete.any(), "the same row many times"
    if is_complete.all():
        in_reach = np.ones(len(tokens), dtype=bool)
        # The last of a support with a tail below the resolution of the uniform need not be its last token.
        in_reach[-1] = probabilities[support[-1]] > 1e-5
        assert drawn[in_reach].tolist() == tokens[in_reach].tolist()
    # A min-p that ends past the candidates leaves the weight of what it keeps, and so the nucleus, unknown.
    if params.top_k or vocab_size <= 256 or (len(support) < 256 and not params.min_p):
        assert is_complete.all()
    elif probabilities[order[256:]].sum() > 1e-5:
        assert not is_complete.any()


@pytest.mark.parametrize("vocab_size", [2, 300, 4099])
@pytest.mark.parametrize("repeat", range(6))
def test_wide_draw_is_the_inverse_of_the_exact_cdf(vocab_size, repeat, rng):
    logits, params = random_logits(rng, vocab_size), random_filters(rng, vocab_size, vocab_size - 1)
    if has_close_call(logits.astype(np.float64), params):
        return
    probabilities = distribution(logits.astype(np.float64), params)
    order = ranked(logits.astype(np.float64))
    tokens, uniforms = middles(probabilities, order)
    support = order[probabilities[order] > 0]
    chosen = rng.permutation(len(tokens))[:60]
    pairs = [*zip(tokens[chosen], uniforms[chosen], strict=True), (support[0], 0.0)]
    if probabilities[support[-1]] > 1e-12:
        pairs.append((support[-1], NEARLY_ONE))
    for token, uniform in pairs:
        how = WideDraw(params.temperature, params.top_k or vocab_size, params.top_p, params.min_p, float(uniform))
        assert int(draw_wide(torch.from_numpy(logits), how)) == token


def test_a_token_without_weight_is_never_drawn():
    logits = torch.full((2, 1000), -3.0e38)
    logits[:, 500] = 1.0
    uniform = torch.tensor([0.0, NEARLY_ONE], dtype=torch.float64)
    assert draw_plain(logits, torch.ones(2), uniform).tolist() == [500, 500]
    group = group_of(SamplingParams(top_p=0.999), 1000, uniform.numpy())
    assert draw_filtered(logits, group, within_candidates=False)[0].tolist() == [500, 500]
    assert [int(draw_wide(logits[0], WideDraw(1.0, 900, 1.0, 0.0, float(u)))) for u in uniform] == [500, 500]


def test_a_tail_of_many_unlikely_tokens_keeps_its_weight():
    # 100,000 tokens of 1e-7 each: a float32 cumulative sum past 1.0 would lose most of this one percent.
    logits = torch.full((1, 100_001), float(np.log(1e-7)))
    logits[0, 0] = 0.0
    uniforms = torch.linspace(0.0, NEARLY_ONE, 401, dtype=torch.float64)
    drawn = draw_plain(logits.expand(401, -1), torch.ones(401), uniforms)
    assert int((drawn > 0).sum()) == pytest.approx(401 * 0.01 / 1.01, abs=1.5)
    assert int(drawn[-1]) == 100_000


def test_min_p_of_one_leaves_every_token_that_ties_with_the_largest():
    logits = torch.zeros((100, 300))
    logits[:, 5] = logits[:, 200] = 2.0
    uniform = torch.linspace(0.0, NEARLY_ONE, 100, dtype=torch.float64)
    group = group_of(SamplingParams(min_p=1.0), 300, uniform.numpy())
    assert draw_filtered(logits, group, within_candidates=False)[0].tolist() == [5] * 50 + [200] * 50
    drawn = [int(draw_wide(logits[0], WideDraw(1.0, 300, 1.0, 1.0, float(u)))) for u in uniform]
    assert drawn == [5] * 50 + [200] * 50
