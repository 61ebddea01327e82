"""Eight-bit floats: products against those of the rounded values, and how far these are from the originals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE
from tokenmill.model.kernels.fp8 import LARGEST, Fp8Weight, quantize_rows


def test_a_row_uses_the_whole_range_and_comes_back_within_half_a_step(rng: np.random.Generator) -> None:
    x = torch.randn(20, 64) * torch.from_numpy(10.0 ** rng.uniform(-6, 6, (20, 1))).float()
    x[3] = 0.0
    values, scales = quantize_rows(x)
    assert (values.float().abs().amax(-1)[x.abs().amax(-1) > 0] == LARGEST).all()
    back = values.float() * scales
    # e4m3 keeps three bits of a fraction; below 2^-6 of the format's unit steps are even.
    error = (back - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scales * 2.0**-10)).all()
    assert torch.equal(back[3], x[3])


def scales_rows(device: str) -> bool:
    """Return True if this torch multiplies there with a scale for each row; its CPU part did not before 2.12."""
    values, scales = quantize_rows(torch.ones(16, 16, device=device))
    try:
        torch._scaled_mm(values, values.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_that_of_the_rounded_values(rng: np.random.Generator, dtype: torch.dtype) -> None:
    if not scales_rows(DEVICE):
        pytest.skip(f"torch {torch.__version__} takes one scale for a whole tensor on {DEVICE}")
    if DEVICE != "cpu" and dtype == torch.float32:
        pytest.skip("products with a scale for each row come out in bfloat16 on a GPU")
    out_size, in_size, tokens = 16 * int(rng.integers(1, 5)), 16 * int(rng.integers(1, 5)), int(rng.integers(1, 9))
    rows, x = torch.randn(out_size, in_size).to(DEVICE), torch.randn(tokens, in_size).to(DEVICE, dtype)
    bias = torch.randn(out_size).to(DEVICE, dtype)
    matrix = Fp8Weight(out_size, in_size, DEVICE)
    matrix.load_rows(0, rows[:5])
    matrix.load_rows(5, rows[5:])
    values, scales = quantize_rows(x)
    want = (values.double() * scales) @ (matrix.weight.double() * matrix.scales).t() + bias.double()
    got = matrix.multiply(x, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02 * in_size**0.5)
    exact = x.double() @ rows.double().t() + bias.double()
    assert (got.double() - exact).norm() < 0.06 * exact.norm(), "rounding costs a few hundredths"


def test_it_takes_half_the_memory() -> None:
    assert Fp8Weight(64, 64, "cpu").num_bytes == 64 * 64 + 64 * 4
