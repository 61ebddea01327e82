"""llama.cpp's blocks at their own bits: looked up as the gguf package reads them, multiplied within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from tests.model.kernels.native import BEST, ISAS, every_isa, kernels
from tokenmill.model.kernels import reference
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.parted_weight import PartedWeight
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.quantization.blocks import LAYOUTS
from tokenmill.model.quantization.packed import BLOCK_FORMATS, BlockRows, PackedFormat, pick_rows
from tokenmill.model.quantization.stored_array import StoredArray

every_kind = pytest.mark.parametrize("kind", [*BLOCK_FORMATS])
# Bits that a weight takes in memory; a file has 3.4375, 4.5, 5.5, 6.5625, 4.5 and 4.25.
BITS = {"Q3_K": 6.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.5}
# Where a block has float16 scales, which random bytes would make infinite.
HALVES = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def drawn(rng: np.random.Generator, kind: str, rows: int, in_size: int) -> BlockRows:
    """Any bytes, but scales that are numbers of a usual size."""
    shape = quants.quant_shape_to_byte_shape((rows, in_size), GGMLQuantizationType[kind])
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    units = blocks.reshape(-1, LAYOUTS[kind][0])
    for at in HALVES.get(kind, (0,)):
        halves = rng.uniform(0.001, 0.02, len(units)).astype(np.float16)
        units[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return BlockRows(kind, in_size, blocks)


def numbers(rows: BlockRows) -> torch.Tensor:
    """The oracle: what the gguf package makes of the blocks."""
    return torch.from_numpy(quants.dequantize(rows.blocks, GGMLQuantizationType[rows.kind]))


def packed(isa: str, rows: BlockRows, threads: int = 1, role: WeightRole = WeightRole.LINEAR) -> PackedWeight:
    matrix = PackedWeight(kernels(isa, threads), rows.shape, role, BLOCK_FORMATS[rows.kind])
    cut = rows.shape[0] // 3
    for begin, end in ((cut, rows.shape[0]), (0, cut)):
        matrix.load_rows(begin, pick_rows(rows, range(begin, end)))
    return matrix


def rounded(x: torch.Tensor) -> torch.Tensor:
    values, scales = reference.quantize_activations(x)
    return (values * scales).flatten(1)[:, : x.shape[1]].double()


def assert_product(found: torch.Tensor, x: torch.Tensor, rows: BlockRows) -> None:
    """Within rounding of sums of terms of this size; IQ4_XS's scales are kept in 11 bits."""
    weight, inputs = numbers(rows).double(), rounded(x)
    terms = inputs.abs() @ (weight.abs() + weight.abs().amax(-1, keepdim=True)).T
    share = 2**-11 if rows.kind == "IQ4_XS" else 2**-20
    assert ((found.double() - inputs @ weight.T).abs() <= share * terms + 1e-30).all()


@every_isa
@every_kind
def test_products_are_those_of_the_numbers_in_the_file(isa: str, kind: str, rng: np.random.Generator) -> None:
    for count in (1, 2, 5, 6, 12, 13, 40, 250):
        rows = drawn(rng, kind, int(rng.integers(3, 140)), 256 * int(rng.integers(1, 4)))
        x = torch.randn(count, rows.shape[1]).bfloat16()
        assert_product(packed(isa, rows, threads=1 + count % 2).logits(x), x, rows)


@every_isa
@every_kind
def test_rows_are_looked_up_as_they_are_stored(isa: str, kind: str, rng: np.random.Generator) -> None:
    rows = drawn(rng, kind, 40, 512)
    found, wanted = packed(isa, rows).lookup(torch.arange(40)), numbers(rows)
    if kind == "IQ4_XS":
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, wanted.bfloat16())


@every_isa
@every_kind
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(
    isa: str, kind: str, rng: np.random.Generator
) -> None:
    rows = drawn(rng, kind, 100, 768)
    x = torch.randn(70, rows.shape[1]).bfloat16()
    whole = packed(isa, rows, 3).logits(x)
    for start, end in ((0, 1), (3, 5), (10, 22), (20, 69)):
        assert torch.equal(packed(isa, rows).logits(x[start:end]), whole[start:end])


@every_kind
def test_products_have_the_same_bits_on_every_level(kind: str, rng: np.random.Generator) -> None:
    rows, x = drawn(rng, kind, 70, 768), torch.randn(40, 768).bfloat16()
    first, *others = (packed(isa, rows).logits(x) for isa in ISAS)
    assert all(torch.equal(found, first) for found in others)


@every_isa
@every_kind
def test_gated_products_and_their_argmax(isa: str, kind: str, rng: np.random.Generator) -> None:
    rows, x = drawn(rng, kind, 90, 256), torch.randn(9, 256).bfloat16()
    sums = (rounded(x) @ numbers(rows).double().T).float()
    expected = functional.silu(sums[:, :45]) * sums[:, 45:]
    gated = packed(isa, rows, 2, WeightRole.GATE_UP).gated(x).float()
    torch.testing.assert_close(gated, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    matrix = packed(isa, rows, 2)
    assert torch.equal(matrix.argmax(x), matrix.logits(x).argmax(-1))


@every_kind
def test_the_largest_numbers_do_not_overflow(kind: str) -> None:
    """All codes and scales at their largest, and activations of one size: the largest sums that there are."""
    shape = quants.quant_shape_to_byte_shape((17, 1024), GGMLQuantizationType[kind])
    for byte in (0xFF, 0x7F, 0):
        blocks = np.full(shape, byte, np.uint8)
        units = blocks.reshape(-1, LAYOUTS[kind][0])
        for at in HALVES.get(kind, (0,))[:1]:
            units[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        if kind in ("Q4_K", "Q5_K"):
            units[:, 2:4] = 0
        rows = BlockRows(kind, 1024, blocks)
        for isa in BEST:
            for count in (1, 7, 40):
                x = torch.ones(count, 1024).bfloat16()
                assert_product(packed(isa, rows).logits(x), x, rows)


@every_kind
def test_a_matrix_takes_the_bytes_of_its_file(kind: str) -> None:
    matrix = PackedWeight(kernels(BEST[0]), (64, 2048), format=BLOCK_FORMATS[kind])
    assert matrix.num_bytes * 8 == BITS[kind] * 64 * 2048


@every_isa
def test_a_row_with_a_bad_number_is_not_a_number_and_alone(isa: str, rng: np.random.Generator) -> None:
    for kind in BLOCK_FORMATS:
        x = torch.randn(9, 256).bfloat16()
        x[4, 50] = torch.inf
        found = packed(isa, drawn(rng, kind, 35, 256)).logits(x)
        assert found[4].isnan().all()
        assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@every_isa
def test_projections_of_one_input_may_have_several_formats(isa: str, rng: np.random.Generator) -> None:
    q, v = drawn(rng, "Q4_K", 40, 512), drawn(rng, "Q6_K", 23, 512)
    k = StoredArray(rng.standard_normal((7, 512)).astype(np.float32), "F32")
    formats = [(PackedFormat.Q4_K, 40), (PackedFormat.BF16, 7), (PackedFormat.Q6_K, 23)]
    matrix = PartedWeight(kernels(isa, 2), 512, formats)
    matrix.load_rows(47, v)
    matrix.load_rows(0, q)
    matrix.load_rows(40, k)
    alone = PackedWeight(kernels(isa), (7, 512))
    alone.load_rows(0, k)
    bias = torch.randn(70).bfloat16()
    for count in (1, 3, 20):
        x = torch.randn(count, 512).bfloat16()
        wanted = torch.cat([packed(isa, q).logits(x), alone.logits(x), packed(isa, v).logits(x)], 1)
        assert torch.equal(matrix.multiply(x), wanted.bfloat16())
        assert torch.equal(matrix.multiply(x, bias), (wanted + bias.float()).bfloat16())


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    matrix = PackedWeight(kernels(BEST[0]), (20, 256), format=PackedFormat.Q4_K)
    with pytest.raises(ValueError, match="made of nothing else"):
        matrix.load_rows(0, torch.randn(20, 256))
    with pytest.raises(ValueError, match="do not fit"):
        matrix.load_rows(0, drawn(rng, "Q4_K", 20, 512))
    odd = PackedWeight(kernels(BEST[0]), (20, 288), format=PackedFormat.Q4_K)
    with pytest.raises(ValueError, match="of this kind do not fit"):
        odd.load_rows(0, BlockRows("Q4_K", 288, np.zeros((20, 162), np.uint8)))


def test_a_matrix_of_another_format_takes_the_numbers(rng: np.random.Generator) -> None:
    for kind in BLOCK_FORMATS:
        rows, matrix = drawn(rng, kind, 20, 256), PackedWeight(kernels(BEST[0]), (20, 256))
        matrix.load_rows(0, rows)
        assert torch.equal(matrix.lookup(torch.arange(20)), numbers(rows).bfloat16())
