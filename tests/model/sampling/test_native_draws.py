"""The native draws against the exact oracle and the draws in torch, on every instruction set of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.model.kernels.native import BEST, every_isa, kernels
from tests.model.sampling.oracle import distribution, draws_of, has_close_call, metadata_of, ranked
from tests.model.sampling.test_ranking import logits_with_ties
from tests.model.sampling.test_reference import NEARLY_ONE, middles, random_filters, random_logits
from tests.model.sampling.test_sampler import random_params
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling import reference
from tokenmill.model.sampling.draws import RECORD, Draw, Kind
from tokenmill.model.sampling.sampler import Sampler, draw_natively

best_isa = pytest.mark.parametrize("isa", BEST)


def drawn(isa: str, logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray, threads: int = 1) -> list[int]:
    """One token for each uniform number, from the same logits."""
    rows = np.tile(logits, (len(uniforms), 1))
    return draw_natively(kernels(isa, threads), rows, draws_of(params, len(logits), uniforms)).tolist()


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 127, 128, 129, 1000, 4099])
def test_unfiltered_draw_is_the_inverse_of_the_cdf_in_order_of_ids(isa, vocab_size, rng):
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
    for nothing in (-3.0e38, -np.inf):
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
def test_rows_with_impossible_tokens_give_the_same_tokens_as_torch(isa, rng):
    for _ in range(30):
        logits = rng.normal(size=(1, 700)).astype(np.float32)
        logits[0, rng.integers(0, 700, 60)] = rng.choice([-np.inf, 0.0], 60)
        params = random_filters(rng, 700, 699)
        draws = draws_of(params, 700, rng.random(1))
        assert np.array_equal(draw_natively(kernels(isa), logits, draws), reference.draw_on_host(logits, draws))


@best_isa
def test_all_logits_equal_are_drawn_by_id(isa):
    logits = np.zeros(5000, dtype=np.float32)
    logits[::2] = -0.0
    params = SamplingParams(top_k=200)
    uniforms = (np.arange(200) + 0.5) / 200
    assert drawn(isa, logits, params, uniforms) == list(range(200))


@best_isa
def test_a_row_draws_the_same_alone_and_in_company_of_others_on_more_threads(isa, rng):
    logits = rng.normal(size=(12, 9000)).astype(np.float32)
    uniforms = rng.random(12)
    for params in (SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=30, min_p=0.01)):
        draws = draws_of(params, 9000, uniforms)
        for row, one in enumerate(draw_natively(kernels(isa, 3), logits, draws).tolist()):
            assert draw_natively(kernels(isa), logits[row : row + 1], draws[row : row + 1]).item() == one


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 5003])
def test_greedy_draw_is_the_lowest_id_of_the_largest(isa, vocab_size, rng):
    logits = logits_with_ties(rng, 20, vocab_size).numpy()
    logits[3] = -0.0
    logits[3, rng.integers(vocab_size)] = 0.0
    draws = draws_of(SamplingParams(temperature=0.0), vocab_size, rng.random(20))
    smallest = np.finfo(np.float32).min  # is taken for -inf there
    rows = logits.max(-1) > smallest
    want = reference.draw_on_host(logits, draws)
    assert np.array_equal(draw_natively(kernels(isa, 2), logits, draws)[rows], want[rows])


@best_isa
def test_the_sampler_takes_the_same_tokens_with_and_without_native_kernels(isa, rng):
    """Draws fall on another side of a border with a chance of about the rounding of float32 weights."""
    no_tokens = np.zeros((20, 40), dtype=np.int32)
    for vocab_size in (300, 3000):
        all_params = [random_params(rng, vocab_size) for _ in range(20)]
        logits = (rng.normal(size=(20, vocab_size)) * 3).astype(np.float32)
        metadata = metadata_of(all_params, vocab_size, 9)
        want, got = (
            Sampler(native=native).sample_logits(logits.copy(), metadata, no_tokens)
            for native in (None, kernels(isa, 2))
        )
        assert got.token_ids.tolist() == want.token_ids.tolist()


def test_the_struct_that_the_kernels_read_has_the_fields_of_a_packed_draw():
    source = (Path(__file__).parents[3] / "native/isa/draw.cpp").read_text()
    struct = re.search(r"struct Draw \{(.*?)\};", source, re.DOTALL)
    assert struct is not None
    fields = [
        (name, {"int64_t": "int64", "double": "float64"}[kind])
        for kind, names in re.findall(r"(\w+) ([\w, ]+);", struct[1])
        for name in names.split(", ")
    ]
    assert fields == [(name, RECORD[name].name) for name in Draw._fields]
    assert f"GREEDY = {Kind.GREEDY:d}, UNFILTERED = {Kind.UNFILTERED:d};" in source
