"""Activations as eight-bit floats in one launch: bit for bit what torch makes of them on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, IS_INTERPRETED
from tokenmill.model.kernels import fp8
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.kernels.triton import fp8 as triton_fp8
from tokenmill.model.kernels.triton.few_rows import FEWEST_ROWS
from tokenmill.model.kernels.triton.fp8 import RoundedRows, quantize_rows
from tokenmill.model.kernels.triton.kernels import TritonFp8Weight, TritonKernels


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
    weights = TritonFp8Weight(out_size, in_size, "cpu", RoundedRows()), fp8.Fp8Weight(out_size, in_size, "cpu")
    for weight in weights:
        weight.load_rows(0, rows)
    got, want = (weight.multiply(x) for weight in weights)
    assert torch.equal(got, want)


@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_rounds_for_the_product_behind_it_as_the_product_would(
    rng: np.random.Generator, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU fewer are not rounded at all.
    size, tokens = 16 * int(rng.integers(1, 9)), FEWEST_ROWS + int(rng.integers(1, 9))
    x, delta, weight = (torch.randn(count, size).to(DEVICE, HALF) for count in (tokens, tokens, 1))
    rows = torch.randn(48, size)
    results = []
    for is_fp8 in (True, False):
        kernels, own = TritonKernels(str(HALF).removeprefix("torch."), DEVICE, fp8=is_fp8), x.clone()
        normed = (
            kernels.add_rms_norm(own, delta, weight[0], 1e-6, 0.5) if adds else kernels.rms_norm(own, weight[0], 1e-6)
        )
        results.append((own, normed))
        if is_fp8:
            product = kernels.linear_weight(48, size, WeightRole.LINEAR)
            product.load_rows(0, rows)
            want, want_scales = fp8.quantize_rows(normed.cpu())
            with monkeypatch.context() as patch:
                patch.setattr(triton_fp8, "quantize_rows", None)
                values, scales = product._quantize(normed)
            assert torch.equal(values.cpu().view(torch.uint8), want.view(torch.uint8))
            assert torch.equal(scales.cpu(), want_scales)
            # Taken once; of what no norm has made, the product rounds itself.
            other = torch.randn(tokens, size).to(DEVICE, HALF)
            for given in (normed, other):
                assert torch.equal(product._quantize(given)[1].cpu(), fp8.quantize_rows(given.cpu())[1])
    for rounding, plain in zip(*results, strict=True):
        assert torch.equal(rounding, plain), "the norm itself stays what it was"
