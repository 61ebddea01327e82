"""Products of bfloat16 on the instruction sets of this machine: one order, which every processor can follow.

AMX has an order of its own; it is left out here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.canonical import import_
from tests.model.attention.test_native import Case, angles, run
from tests.model.kernels.native import ISAS, every_isa, kernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import WeightRole

IN_ORDER = [isa for isa in ISAS if isa != "amx"]
in_order = pytest.mark.parametrize("isa", IN_ORDER)
SMALLEST_NORMAL = 2.0**-126

Floats = npt.NDArray[np.float32]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def flushed(values: Floats) -> Floats:
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def fused(a: Floats, b: Floats, sums: Floats) -> Floats:
    """Return a * b + sums, rounded once: in float64 rounded to odd, from which float32 rounds as from the exact sum."""
    product, c = a.astype(np.float64) * b, sums.astype(np.float64)
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + step, bits).view(np.float64)
    return flushed(odd.astype(np.float32))


def product_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, pair by pair of the inputs: the odd product is added first, then the even one."""
    a, w = (flushed(t.float().numpy()) for t in (x, weight))
    if a.shape[1] % 2:
        a, w = (np.pad(numbers, ((0, 0), (0, 1))) for numbers in (a, w))
    sums = np.zeros((len(a), len(w)), dtype=np.float32)
    for even in range(0, a.shape[1], 2):
        for k in (even + 1, even):
            sums = fused(a[:, k, None], w[None, :, k], sums)
    return torch.from_numpy(sums)


def packed(isa: str, weight: torch.Tensor, threads: int = 1) -> PackedWeight:
    matrix = PackedWeight(kernels(isa, threads), tuple(weight.shape), WeightRole.LINEAR)
    matrix.load_rows(0, weight)
    return matrix


@in_order
def test_the_odd_product_of_a_pair_is_added_first(isa: str, rng: np.random.Generator) -> None:
    for rows in (1, 2, 7, 40):
        x, weight = drawn(rows, int(rng.integers(1, 300))), torch.empty(0)
        weight = drawn(int(rng.integers(1, 70)), x.shape[1])
        assert torch.equal(packed(isa, weight, 2).logits(x), product_in_order(x, weight))


@in_order
def test_denormals_count_as_zero_in_products(isa: str, rng: np.random.Generator) -> None:
    """As inputs, as weights and as sums: numbers around the smallest normal one, whose products are far below it."""
    scales = torch.from_numpy(2.0 ** rng.integers(-70, -55, 90)).float()
    for rows in (1, 6):
        x, weight = (torch.randn(rows, 90) * scales).bfloat16(), (torch.randn(33, 90) * scales).bfloat16()
        x[:, ::7], weight[:, ::5] = 2.0**-130, 2.0**-128
        weight[:, ::14] = 1.0
        found = packed(isa, weight).logits(x)
        assert torch.equal(found, product_in_order(x, weight))
        assert (found.abs() >= SMALLEST_NORMAL).logical_or(found == 0).all()


@every_isa
def test_every_level_rounds_to_bfloat16_alike(isa: str, rng: np.random.Generator) -> None:
    """All kinds of numbers: halves between two, denormals, infinities, numbers that round to one, and NaN."""
    bits = rng.integers(0, 1 << 32, (64, 96), dtype=np.uint64).astype(np.uint32)
    bits[:16] &= 0x807FFFFF  # denormals
    bits[16:32] = (bits[16:32] & 0xFFFF0000) | 0x8000  # halves
    bits[32:36] |= 0x7F7F0000  # large, infinite or NaN
    values = torch.from_numpy(bits.view(np.float32))
    found = packed(isa, values).lookup(torch.arange(64))
    assert torch.equal(found.nan_to_num(), values.bfloat16().nan_to_num())
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.signbit()[~values.isnan()], values.signbit()[~values.isnan()])


@pytest.mark.skipif(len(IN_ORDER) < 2, reason="one level has nothing to be compared with")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])
def test_attention_has_the_same_bits_on_every_level(kv_dtype: str, rng: np.random.Generator) -> None:
    for _ in range(4):
        case = Case.draw(rng, longest=300)
        requests = case.requests(rng)
        chunks = case.chunks(rng)
        requests.computed = [length - dict(chunks)[request] for request, length in enumerate(case.lengths)]
        memory, batch = case.memory(requests, 0.0), requests.batch(chunks)
        qkv, rotary = case.qkv(len(batch.token_ids)), angles(800, case.spec.head_dim)
        outputs = []
        for isa in IN_ORDER:
            attention = case.native(requests.num_pages, isa, int(rng.integers(1, 4)), kv_dtype)
            import_(attention.kv, range(requests.num_pages), memory)
            outputs.append(run(attention, batch, qkv, rotary, None, case.window))
        assert all(torch.equal(found, outputs[0]) for found in outputs[1:]), case
