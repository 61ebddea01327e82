"""Activations as eight-bit floats in one launch: bit for bit what torch makes of them on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu import DEVICE, HALF, IS_INTERPRETED
from tokenmill.kernels import fp8
from tokenmill.kernels.triton.fp8 import quantize_rows
from tokenmill.kernels.triton.kernels import TritonFp8Weight


def assert_same(x: torch.Tensor) -> None:
    values, scales = quantize_rows(x.to(DEVICE))
    want, want_scales = fp8.quantize_rows(x)
    assert values.dtype == want.dtype
    assert scales.shape == want_scales.shape
    assert torch.equal(scales.cpu().nan_to_num(-1), want_scales.nan_to_num(-1))
    # NaN has no sign that means anything.
    is_number = ~want.float().isnan()
    assert torch.equal(~values.cpu().float().isnan(), is_number)
    assert torch.equal(values.cpu().view(torch.uint8)[is_number], want.view(torch.uint8)[is_number])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rows_are_rounded_as_torch_rounds_them(rng: np.random.Generator, dtype: torch.dtype) -> None:
    for size in (1, 16, 130, 1500):
        x = torch.randn(int(rng.integers(0, 6)), size)
        # Many numbers far below the largest of their row: there steps are even.
        x *= torch.from_numpy(10.0 ** rng.uniform(-6, 0, x.shape)).float()
        assert_same((x * float(10.0 ** rng.uniform(-3, 3))).to(dtype))


def test_every_number_of_the_format_and_every_tie_between_two() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8.FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [middles.nextafter(middles + step) for step in (-1, 1)]
    assert_same(torch.cat([numbers, middles, *near])[None])


def test_zeros_infinities_and_what_is_no_number() -> None:
    x = torch.tensor(
        [[0.0, -0.0, 0.0], [1.0, float("nan"), -2.0], [float("inf"), 1.0, -float("inf")], [1e-20, -1e-13, 0]]
    )
    assert_same(x)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the product of the other weight is the same one there")
def test_a_product_is_that_of_torchs_rounding(rng: np.random.Generator) -> None:
    out_size, in_size, tokens = 16 * int(rng.integers(1, 5)), 16 * int(rng.integers(1, 5)), int(rng.integers(1, 9))
    rows, x = torch.randn(out_size, in_size), torch.randn(tokens, in_size).bfloat16()
    weights = TritonFp8Weight(out_size, in_size, "cpu"), fp8.Fp8Weight(out_size, in_size, "cpu")
    for weight in weights:
        weight.load_rows(0, rows)
    got, want = (weight.multiply(x) for weight in weights)
    assert torch.equal(got, want)
