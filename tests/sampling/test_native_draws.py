"""The native draws against the exact oracle and the draws in torch, on every instruction set of this machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.kernels.native import BEST, every_isa, kernels
from tests.sampling.oracle import batch_of, distribution, has_close_call, ranked
from tests.sampling.test_draws import NEARLY_ONE, group_of, middles, random_filters, random_logits
from tests.sampling.test_sampler import random_params
from tokenmill.kernels import native_ops
from tokenmill.sampling.candidates import finite
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.wide import WideDraw, draw_wide
from tokenmill.sampling_params import SamplingParams

best_isa = pytest.mark.parametrize("isa", BEST)


def drawn(isa: str, logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray, threads: int = 1) -> list[int]:
    """One token for each uniform number, from the same logits."""
    rows = torch.from_numpy(logits).expand(len(uniforms), -1).contiguous()
    return native_ops.draw(kernels(isa, threads), rows, group_of(params, len(logits), uniforms)).tolist()


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 127, 128, 129, 1000, 4099])
def test_plain_draw_is_the_inverse_of_the_cdf_in_order_of_ids(isa, vocab_size, rng):
    logits = random_logits(rng, vocab_size)
    params = SamplingParams(temperature=float(rng.uniform(0.05, 2.0)))
    tokens, uniforms = middles(distribution(logits.astype(np.float64), params), np.arange(vocab_size))
    assert drawn(isa, logits, params, uniforms) == tokens.tolist()


@every_isa
@pytest.mark.parametrize("vocab_size", [2, 50, 256, 257, 4099, 40_000])
def test_filtered_draw_is_the_inverse_of_the_exact_cdf(isa, vocab_size, rng):
    for repeat in range(4):
        # Few candidates decide, or nearly all of the vocabulary.
        largest_top_k = 256 if repeat % 2 else vocab_size - 1
        logits, params = random_logits(rng, vocab_size), random_filters(rng, vocab_size, largest_top_k)
        if has_close_call(logits.astype(np.float64), params):
            continue
        tokens, uniforms = middles(distribution(logits.astype(np.float64), params), ranked(logits.astype(np.float64)))
        chosen = rng.permutation(len(tokens))[:50]
        assert drawn(isa, logits, params, uniforms[chosen]) == tokens[chosen].tolist(), params


@every_isa
def test_a_token_without_weight_is_never_drawn(isa):
    uniforms = np.array([0.0, NEARLY_ONE])
    for nothing in (-3.0e38, -np.inf, np.nan):
        logits = np.full(1000, nothing, dtype=np.float32)
        logits[500] = 1.0
        for params in (
            SamplingParams(),
            SamplingParams(top_p=0.999),
            SamplingParams(top_k=7),
            SamplingParams(min_p=0.1),
        ):
            assert drawn(isa, logits, params, uniforms) == [500, 500]


@best_isa
def test_rows_that_are_no_numbers_give_the_same_tokens_as_torch(isa, rng):
    for _ in range(30):
        logits = torch.randn(1, 700)
        where = torch.from_numpy(rng.integers(0, 700, 60))
        logits[0, where] = torch.tensor(rng.choice([np.nan, np.inf, -np.inf, 0.0], 60), dtype=torch.float32)
        params = random_filters(rng, 700, 699)
        group = group_of(params, 700, rng.random(1))
        how = WideDraw(params.temperature, int(group.top_k), params.top_p, params.min_p, float(group.uniform))
        assert native_ops.draw(kernels(isa), logits, group).item() == draw_wide(finite(logits)[0], how).item()


@best_isa
def test_all_logits_equal_are_drawn_by_id(isa):
    logits = np.zeros(5000, dtype=np.float32)
    logits[::2] = -0.0
    params = SamplingParams(top_k=200)
    uniforms = (np.arange(200) + 0.5) / 200
    assert drawn(isa, logits, params, uniforms) == list(range(200))


@best_isa
def test_a_row_draws_the_same_alone_and_in_company_of_others_on_more_threads(isa, rng):
    logits = torch.randn(12, 9000)
    uniforms = rng.random(12)
    for params in (SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=30, min_p=0.01)):
        group = dataclasses.replace(group_of(params, 9000, uniforms), indices=torch.from_numpy(rng.permutation(12)))
        together = native_ops.draw(kernels(isa, 3), logits, group)
        for part, one in zip(group.parts(1), together.tolist(), strict=True):
            assert native_ops.draw(kernels(isa), logits, part).item() == one


@best_isa
def test_the_sampler_takes_the_same_tokens_with_and_without_native_kernels(isa, rng):
    """Draws fall on another side of a border with a chance of about the rounding of float32 weights."""
    no_tokens = torch.zeros((20, 40), dtype=torch.int32)
    for vocab_size in (300, 3000):
        all_params = [random_params(rng, vocab_size) for _ in range(20)]
        logits, batch = torch.randn(20, vocab_size) * 3, batch_of(all_params, vocab_size, 9)
        want, got = (Sampler(native).sample(logits, batch, no_tokens) for native in (None, kernels(isa, 2)))
        assert got.token_ids.tolist() == want.token_ids.tolist()
