"""Masks in the sampler: those that come before a draw, and those that decide about one that was made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.model.sampling.oracle import chi_square_deviate, distribution, new_row
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.sampling.bitmask import TokenBitmask
from tokenmill.model.sampling.sampler import Sampler
from tokenmill.model.sampling.state import SamplingState


@dataclass
class FixedMasks:
    """The masks of a step."""

    first: TokenBitmask | None = None
    later: TokenBitmask | None = None

    def ready(self, arrays: object) -> TokenBitmask | None:
        return self.first

    def deciding(self, token_ids: np.ndarray) -> TokenBitmask | None:
        return self.later


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_redraw_among_what_is_allowed_leaves_the_distribution_that_a_mask_gives(chance, rng):
    logits = (2 * rng.normal(size=50)).astype(np.float32)
    is_allowed = rng.random(50) < chance
    is_allowed[int(rng.integers(50))] = True
    state = SamplingState(100, 50)
    for row in range(100):
        state.set(new_row(row, SamplingParams(), seed=int(rng.integers(2**40))))
    bits = np.packbits(np.append(is_allowed, np.zeros(14, dtype=bool)), bitorder="little").view(np.int32)
    rows, counts = np.arange(100), np.zeros(50, dtype=np.int64)
    masks = FixedMasks(later=TokenBitmask(rows, np.tile(bits, (100, 1))))
    same, no_tokens = np.tile(logits, (100, 1)), np.zeros((100, 1))
    for position in range(1, 101):
        metadata = state.select(rows, np.full(100, position))
        drawn = Sampler().sample_logits(same.copy(), metadata, no_tokens, masks).token_ids
        unmasked = Sampler().sample_logits(same.copy(), metadata, no_tokens).token_ids
        assert (drawn == unmasked)[is_allowed[unmasked]].all(), "what the mask has is kept"
        counts += np.bincount(drawn, minlength=50)
    masked = distribution(np.where(is_allowed, logits, -np.inf), SamplingParams())
    assert counts[~is_allowed].sum() == 0
    assert chi_square_deviate(counts, masked) < 5.0
