"""Matrices in mxfp4, as they are stored: products as the reference sums them, in any batch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.native import BEST, every_isa, kernels
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels import reference
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import Gate, WeightRole
from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.kernels.torch_kernels import gated
from tokenmill.model.quantization.packed import FP4, Mxfp4Rows, PackedFormat, QuantizedRows


def drawn(rng: np.random.Generator, rows: int, groups: int) -> Mxfp4Rows:
    blocks = rng.integers(0, 256, (rows, groups, 16), dtype=np.uint8)
    return Mxfp4Rows(blocks, rng.integers(110, 130, (rows, groups), dtype=np.uint8))


def packed(isa: str, rows: Mxfp4Rows, threads: int = 1, role: WeightRole = WeightRole.LINEAR) -> PackedWeight:
    matrix = PackedWeight(kernels(isa, threads), rows.shape, role, PackedFormat.MXFP4)
    cut = rows.shape[0] // 3
    matrix.load_rows(cut, Mxfp4Rows(rows.blocks[cut:], rows.scales[cut:]))
    matrix.load_rows(0, Mxfp4Rows(rows.blocks[:cut], rows.scales[:cut]))
    return matrix


def integers(rows: Mxfp4Rows) -> QuantizedRows:
    """The same numbers: twice those of four bits, times half of the scale."""
    values = (2 * np.array(FP4)).astype(np.int8)[rows.codes].reshape(len(rows.blocks), -1)
    return QuantizedRows(4, values, np.ldexp(np.float32(1), rows.scales.astype(np.int32) - 128))


@every_isa
def test_products_are_those_of_the_reference(isa: str, rng: np.random.Generator) -> None:
    for count in (1, 2, 5, 6, 12, 13, 40, 250):
        rows = drawn(rng, int(rng.integers(3, 140)), int(rng.integers(1, 12)))
        x = torch.randn(count, rows.shape[1]).bfloat16()
        got = packed(isa, rows, threads=1 + count % 2).logits(x)
        want = reference.multiply(x, integers(rows))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@every_isa
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(isa: str, rng: np.random.Generator) -> None:
    rows = drawn(rng, 100, 9)
    x = torch.randn(70, rows.shape[1]).bfloat16()
    whole = packed(isa, rows, 3).logits(x)
    for start, end in ((0, 1), (3, 5), (10, 22), (20, 69)):
        assert torch.equal(packed(isa, rows).logits(x[start:end]), whole[start:end])


@every_isa
def test_a_gated_product_with_biases(isa: str, rng: np.random.Generator) -> None:
    rows = drawn(rng, 90, 5)
    rows = Mxfp4Rows(rows.blocks, rows.scales.clip(max=122))
    x, bias = torch.randn(9, rows.shape[1]).bfloat16(), torch.randn(90).bfloat16()
    sums = reference.multiply(x, integers(rows)) + bias.float()
    for gate in Gate:
        got = packed(isa, rows, 2, WeightRole.GATE_UP).gated(x, bias, gate)
        torch.testing.assert_close(got.float(), gated(sums.clone(), gate), rtol=2**-7, atol=1e-3)


def test_rows_are_looked_up_as_they_are_stored(rng: np.random.Generator) -> None:
    rows = drawn(rng, 40, 3)
    for isa in BEST:
        found = packed(isa, rows).lookup(torch.arange(40))
        assert torch.equal(found, floats(rows).bfloat16())


@every_isa
def test_a_row_with_a_bad_number_is_not_a_number_and_alone(isa: str, rng: np.random.Generator) -> None:
    rows, bad = drawn(rng, 35, 3), torch.inf
    x = torch.randn(9, 96).bfloat16()
    x[4, 50] = bad
    found = packed(isa, rows).logits(x)
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_largest_numbers_do_not_overflow(rng: np.random.Generator) -> None:
    """Codes of 6 and -6 everywhere, and activations of one size: the largest sums that there are."""
    blocks = torch.full((32, 4, 16), 0x77, dtype=torch.uint8)
    blocks[16:] = 0xFF
    rows = Mxfp4Rows(blocks, np.full((32, 4), 127, np.uint8))
    for isa in BEST:
        for count in (1, 7, 40):
            found = packed(isa, rows).logits(torch.ones(count, 128).bfloat16())
            assert torch.equal(
                found, torch.cat([torch.full((16,), 768.0), torch.full((16,), -768.0)]).expand(count, 32)
            )


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    matrix, rows = PackedWeight(kernels(BEST[0]), (20, 64), format=PackedFormat.MXFP4), drawn(rng, 20, 2)
    with pytest.raises(ValueError, match="made of nothing else"):
        matrix.load_rows(0, torch.randn(20, 64))
    rows.scales[3, 1] = 150
    with pytest.raises(InvalidCheckpoint, match=r"has the scale 2\^23, above 2\^16"):
        matrix.load_rows(0, rows)


def test_a_matrix_of_another_format_takes_the_numbers(rng: np.random.Generator) -> None:
    rows = drawn(rng, 20, 2)
    matrix = PackedWeight(kernels(BEST[0]), (20, 64))
    matrix.load_rows(0, rows)
    assert torch.equal(matrix.lookup(torch.arange(20)), floats(rows).bfloat16())
