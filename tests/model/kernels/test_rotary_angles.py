"""cos and sin of rotary angles: numpy's form, the native kernel, and exact numbers from arithmetic of many digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tokenmill.model.kernels.rotary_angles import MOST_POSITIONS, cos_and_sin

DIGITS = 60


def frequencies(rng: np.random.Generator, size: int) -> np.ndarray:
    """Frequencies of a head: 1, smaller ones, and 0 for numbers that stay."""
    found = (1 / float(rng.choice([1e4, 5e5, 1e7])) ** (np.arange(size) / size)).astype(np.float32)
    found[size - size // 8 :] = 0
    return found


@every_isa
def test_the_native_kernel_has_the_bits_of_numpy_on_any_threads(isa: str, rng: np.random.Generator) -> None:
    for size in (1, 3, 16, 40, 64):
        own, positions = frequencies(rng, size), int(rng.integers(1, 3000))
        want = cos_and_sin(own, positions)
        for threads in (1, 2, 3):
            got = cos_and_sin(own, positions, kernels(isa, threads))
            assert all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(got, want, strict=True))


def test_a_position_has_the_same_numbers_in_any_table(rng: np.random.Generator) -> None:
    own = frequencies(rng, 24)
    for long, short in zip(cos_and_sin(own, 5000), cos_and_sin(own, 1234), strict=True):
        assert np.array_equal(long[:1234], short)


def test_numbers_are_the_exact_ones_rounded_once(rng: np.random.Generator) -> None:
    """Of random angles up to the largest, and of multiples of a quarter turn, where one of the two is nearly zero."""
    turns = np.arange(1, 2000, dtype=np.float64) * (np.pi / 2)
    random = rng.uniform(0, 2.0 ** rng.integers(-20, 24, 3000))
    angles = np.concatenate([random, turns, turns * 5000]).astype(np.float32)
    cos, sin = (table[1] for table in cos_and_sin(angles, 2))
    with mpmath.workdps(DIGITS):
        exact = [mpmath.mpf(angle) for angle in angles.tolist()]
        for got, function in ((cos, mpmath.cos), (sin, mpmath.sin)):
            assert np.array_equal(got, np.array([float(function(x)) for x in exact], dtype=np.float32))


def test_tables_are_those_of_torch_but_for_last_bits(rng: np.random.Generator) -> None:
    own = frequencies(rng, 64)
    angles = torch.outer(torch.arange(20000, dtype=torch.float32), torch.from_numpy(own))
    for got, want in zip(cos_and_sin(own, 20000), (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1.2e-7)


def test_more_positions_than_float32_tells_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16777216"):
        cos_and_sin(np.ones(1, dtype=np.float32), MOST_POSITIONS + 1)
