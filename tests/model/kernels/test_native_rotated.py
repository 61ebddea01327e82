"""Rotated int8, what encoders are made to: weights and products against plain torch, on every instruction set here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.model.kernels.native import every_isa
from tests.model.kernels.test_native_linear import drawn, packed
from tokenmill.model.kernels import reference
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.quantization.packed import PackedFormat

ROTATED = PackedFormat.INT8_ROTATED


def rotated(isa: str, weight: torch.Tensor, threads: int = 1, role: WeightRole = WeightRole.LINEAR) -> PackedWeight:
    return packed(isa, weight, threads, role, ROTATED)


def impulses(rows: int, blocks: int, rng: np.random.Generator) -> torch.Tensor:
    """Rows of one number in each block, which becomes 64 of one size."""
    places = torch.from_numpy(rng.integers(0, 64, (rows, blocks)))
    return 8.0 * functional.one_hot(places, 64).float().flatten(1)


def test_a_rotation_keeps_products_and_is_its_own_inverse(rng: np.random.Generator) -> None:
    x, y = torch.randn(5, 192), torch.randn(7, 192)
    torch.testing.assert_close(reference.rotate(x) @ reference.rotate(y).T, x @ y.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reference.rotate(reference.rotate(x)), x)
    assert reference.rotate(impulses(3, 2, rng)).abs().eq(1).all()


@every_isa
def test_weights_are_rounded_as_the_reference_says(isa: str, rng: np.random.Generator) -> None:
    for in_size in (1, 31, 64, 200, 300):
        weight = torch.randn(37, in_size) * torch.rand(37, 1) * 10 ** float(rng.integers(-3, 2))
        weight[5] = 0
        for source in (weight, weight.bfloat16(), weight.half()):
            wanted = reference.rotate(floats(reference.quantize_rotated(source)))[:, :in_size].bfloat16()
            assert torch.equal(rotated(isa, source).lookup(torch.arange(37)), wanted)


@every_isa
def test_products_are_those_of_the_reference(isa: str, rng: np.random.Generator) -> None:
    for rows in (1, 2, 5, 7, 13, 25, 60):
        out_size, in_size = int(rng.integers(1, 140)), int(rng.integers(1, 900))
        x, weight, bias = drawn(rows, in_size), torch.randn(out_size, in_size), drawn(out_size)
        matrix, atol = rotated(isa, weight, 1 + rows % 2), 1e-5 * in_size**0.5
        wanted = reference.multiply_rotated(x, reference.quantize_rotated(weight))
        torch.testing.assert_close(matrix.logits(x), wanted, rtol=2e-6, atol=atol)
        torch.testing.assert_close(matrix.multiply(x, bias).float(), wanted + bias, rtol=2**-7, atol=atol)


@every_isa
def test_a_gated_product_is_that_of_its_halves(isa: str, rng: np.random.Generator) -> None:
    half, in_size = int(rng.integers(1, 90)), int(rng.integers(1, 300))
    x, weight = drawn(11, in_size), torch.randn(2 * half, in_size) / in_size**0.5
    sums = reference.multiply_rotated(x, reference.quantize_rotated(weight))
    found = rotated(isa, weight, role=WeightRole.GATE_UP).gated(x)
    wanted = functional.silu(sums[:, :half]) * sums[:, half:]
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=2e-4)


@every_isa
def test_what_is_rounded_costs_a_hundredth(isa: str) -> None:
    """Of inputs and weights without a tail; an input that stands out spreads over its block."""
    x, weight = torch.randn(50, 768).bfloat16(), torch.randn(40, 768)
    for outlier, most in ((1.0, 0.013), (40.0, 0.025)):
        x[:, 70] = outlier
        weight[:, 70] = 0.1
        wanted = x.double() @ weight.double().T
        assert (rotated(isa, weight).logits(x) - wanted).norm() / wanted.norm() < most


@every_isa
def test_the_largest_integers_do_not_overflow(isa: str, rng: np.random.Generator) -> None:
    weight = impulses(17, 64, rng)
    for sign in (1, -1):
        x = torch.cat([sign * weight[:3], torch.zeros(1, 4096)]).bfloat16()
        found = rotated(isa, weight).logits(x)
        torch.testing.assert_close(found, x.float() @ weight.T, rtol=1e-5, atol=1e-3)


@every_isa
def test_a_bad_number_stays_in_its_row_and_column(isa: str) -> None:
    for bad in (torch.nan, torch.inf):
        x, weight = drawn(9, 300), torch.randn(35, 300)
        x[4, 7], weight[20, 11] = bad, bad
        clean = torch.ones(9, 35, dtype=torch.bool)
        clean[4], clean[:, 20] = False, False
        assert rotated(isa, weight).logits(x).isfinite().eq(clean).all()


@every_isa
def test_tiny_and_huge_numbers_are_zeros_or_rounded(isa: str) -> None:
    weight = torch.randn(20, 128)
    x = torch.stack([torch.full((128,), 1e-38), torch.zeros(128), torch.randn(128) * 1e30]).bfloat16()
    found = rotated(isa, weight).logits(x)
    assert found[:2].eq(0).all()
    wanted = x[2].double() @ weight.double().T
    assert (found[2] - wanted).norm() / wanted.norm() < 0.03


@every_isa
def test_integers_of_a_checkpoint_are_rounded_once_more(isa: str, rng: np.random.Generator) -> None:
    rows = reference.quantize_int8(torch.randn(40, 256))
    matrix = PackedWeight(rotated(isa, torch.zeros(1, 64))._kernels, (40, 256), format=ROTATED)
    matrix.load_rows(0, rows)
    wanted = floats(reference.quantize_rotated(floats(rows)))
    assert torch.equal(matrix.lookup(torch.arange(40)), reference.rotate(wanted).bfloat16())
    with pytest.raises(ValueError, match="made of floats alone"):
        matrix._load_integers(0, rows)
