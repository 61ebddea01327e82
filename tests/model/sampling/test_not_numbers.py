"""Logits that are no numbers: their row gets no token, whatever it asks for, and every other row keeps its own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels.native import BEST, every_isa, kernels
from tests.model.kernels.test_native_linear import drawn, packed
from tests.model.sampling.oracle import draws_of, metadata_of
from tests.model.sampling.test_masks import FixedMasks
from tests.model.sampling.test_sampler import Case, random_case
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.sampling.bitmask import TokenBitmask
from tokenmill.model.sampling.draws import NO_TOKEN
from tokenmill.model.sampling.logprobs import to_messages
from tokenmill.model.sampling.sampler import NOTHING_LEFT, Outputs, Sampler, draw_natively

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=20),
    SamplingParams(top_k=280),
    SamplingParams(min_p=0.1),
]
sampler_of = pytest.mark.parametrize("isa", [None, *BEST])


def sampler(isa: str | None) -> Sampler:
    return Sampler(native=None if isa is None else kernels(isa))


def poison(rng: np.random.Generator, logits: np.ndarray, rows: np.ndarray) -> None:
    """One NaN or infinity somewhere in each of these rows, many of them, or nothing but -inf."""
    for number, row in enumerate(rows):
        few = rng.choice(logits.shape[1], size=1 + rng.integers(3))
        match number % 4:
            case 0:
                logits[row, few] = np.nan
            case 1:
                logits[row, few] = np.inf
            case 2:
                logits[row] = -np.inf
            case 3:
                logits[row] = np.nan


def masks_of_some(rng: np.random.Generator, num_rows: int, vocab_size: int) -> FixedMasks:
    """Masks, as of grammars, for some rows."""
    rows = np.sort(rng.permutation(num_rows)[: num_rows // 2])
    bits = rng.integers(-(2**31), 2**31, size=(len(rows), -(-vocab_size // 32)), dtype=np.int32)
    bits |= 1  # something is left
    return FixedMasks(TokenBitmask(rows, bits))


@sampler_of
@pytest.mark.parametrize("vocab_size", [7, 331, 5001])
def test_rows_that_are_no_numbers_get_no_token_and_the_others_their_own(isa, vocab_size, rng):
    case: Case = random_case(rng, 48, vocab_size)
    metadata = case.state.select(np.arange(48), case.positions)
    masks = masks_of_some(rng, 48, vocab_size) if rng.random() < 0.5 else None
    want = sampler(isa).sample_logits(case.logits.copy(), metadata, case.token_table, masks)
    broken = rng.permutation(48)[:20]
    logits = case.logits.copy()
    poison(rng, logits, broken)
    got = sampler(isa).sample_logits(logits, metadata, case.token_table, masks)
    assert (got.token_ids[broken] == NO_TOKEN).all()
    others = np.setdiff1d(np.arange(48), broken)
    assert np.array_equal(got.token_ids[others], want.token_ids[others])
    if want.logprobs is not None and got.logprobs is not None:
        told, expected = to_messages(got.logprobs), to_messages(want.logprobs)
        assert all(told[row] == expected[row] for row in others.tolist() if row in expected)
        assert all(np.isnan(told[row].sampled.logprob) for row in broken.tolist() if row in told)


@sampler_of
def test_single_tokens_without_any_chance_are_legal(isa, rng):
    """A model's own -inf, and what masks, bans and rules leave of the others."""
    logits = np.full((40, 300), -np.inf, dtype=np.float32)
    logits[:, 17] = -5.0
    metadata, no_tokens = metadata_of((KINDS * 7)[:40], 300), np.zeros((40, 1), dtype=np.int32)
    sampled = sampler(isa).sample_logits(logits, metadata, no_tokens)
    assert (sampled.token_ids == 17).all()


@sampler_of
def test_where_rules_and_a_mask_leave_nothing_there_is_no_token(isa, rng):
    params = [msgspec.structs.replace(kind, allowed_token_ids=(5, 6)) for kind in KINDS]
    bits = np.zeros((len(params), 10), dtype=np.int32)
    bits[:, 1] = 1  # token 32
    masks, no_tokens = FixedMasks(TokenBitmask(np.arange(len(params)), bits)), np.zeros((6, 1), dtype=np.int32)
    logits = rng.normal(size=(len(params), 300)).astype(np.float32)
    metadata = metadata_of(params, 300)
    sampled = sampler(isa).sample_logits(logits.copy(), metadata, no_tokens, masks)
    assert (sampled.token_ids == NO_TOKEN).all()
    told = sampler(isa).sample(Outputs(LogitsThemselves(), logits), metadata, no_tokens, masks)
    assert (told.token_ids == NOTHING_LEFT).all()


class LogitsThemselves:
    """A head whose outputs are logits."""

    def logits(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.copy()

    def argmax(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(-1)


@every_isa
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_native_draws_find_a_single_one_wherever_it_is(isa, value, rng):
    for size in (2, 15, 16, 17, 128, 300):
        logits = rng.normal(size=(size, size)).astype(np.float32)
        np.fill_diagonal(logits, value)
        for kind in KINDS:
            drawn = draw_natively(kernels(isa), logits, draws_of(kind, size, rng.random(size)))
            assert (drawn == NO_TOKEN).all(), kind


@every_isa
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_argmax_of_a_head_says_where_it_is_no_number(isa, value, rng):
    weight, x = drawn(331, 33), drawn(5, 33)
    x[1, 3], x[3] = value, torch.nan
    own = TorchKernels("bfloat16", "cpu").linear_weight(331, 33)
    own.load_rows(0, weight)
    for matrix in (packed(isa, weight, threads=2), own):
        # Infinity times numbers of both signs is infinite in both directions.
        assert (matrix.argmax(x) == NO_TOKEN).tolist() == [False, True, False, True, False]
