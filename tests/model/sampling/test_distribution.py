"""Frequencies of drawn tokens against the exact probabilities, over many (seed, position) pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.sampling.oracle import chi_square_deviate, distribution, draw_many
from tokenmill.core.sampling_params import SamplingParams

CASES = {
    "unfiltered": SamplingParams(),
    "hot": SamplingParams(temperature=1.9),
    "cold": SamplingParams(temperature=0.4),
    "top_k": SamplingParams(temperature=0.9, top_k=12),
    "large_top_k": SamplingParams(temperature=1.5, top_k=300),
    "top_p": SamplingParams(temperature=1.1, top_p=0.83),
    "min_p": SamplingParams(min_p=0.02),
    "all": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
}
# A sum of about 20 normal deviates beyond this is a matter of 1e-6.
LIMIT = 5.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab_size", [40, 3001])
def test_frequencies_are_those_of_the_exact_distribution(name, vocab_size, rng):
    params = CASES[name]
    logits = (rng.normal(size=vocab_size) * (1.5 if vocab_size < 100 else 3.0)).astype(np.float32)
    probabilities = distribution(logits.astype(np.float64), params)
    num_draws = 1000 if (probabilities > 0).sum() > 256 and name != "unfiltered" else 6000
    drawn = draw_many(logits, params, num_draws, seed=int(rng.integers(2**40)))
    counts = np.bincount(drawn, minlength=vocab_size)
    # One border token more or less is what float32 may see otherwise than float64.
    assert counts[probabilities == 0].sum() <= 3
    assert abs(chi_square_deviate(counts, probabilities)) < LIMIT


def test_a_nucleus_of_most_of_the_vocabulary_is_exact_too(rng):
    logits = (rng.normal(size=3001) * 0.7).astype(np.float32)
    params = SamplingParams(top_p=0.9)
    drawn = draw_many(logits, params, 1000, seed=int(rng.integers(2**40)))
    probabilities = distribution(logits.astype(np.float64), params)
    assert (probabilities > 0).sum() > 1000
    assert abs(chi_square_deviate(np.bincount(drawn, minlength=3001), probabilities)) < LIMIT


def test_the_measure_tells_a_slightly_different_distribution(rng):
    logits = (rng.normal(size=40) * 2).astype(np.float32)
    drawn = draw_many(logits, SamplingParams(temperature=1.15), 10_000, seed=int(rng.integers(2**40)))
    probabilities = distribution(logits.astype(np.float64), SamplingParams())
    assert chi_square_deviate(np.bincount(drawn, minlength=40), probabilities) > LIMIT


def test_greedy_never_draws(rng):
    logits = torch.randn(40).numpy()
    assert set(draw_many(logits, SamplingParams(temperature=0.0), 200, seed=0)) == {int(logits.argmax())}
    assert set(draw_many(logits, SamplingParams(top_k=1), 200, seed=0)) == {int(logits.argmax())}
