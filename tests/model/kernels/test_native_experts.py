"""Mixtures in one native call: the bits of one expert after the other, in every format, with and without biases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tokenmill.model.kernels.experts import LoopedExperts
from tokenmill.model.kernels.native_kernels import NativeExperts
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import Gate, WeightRole
from tokenmill.model.quantization.packed import PackedFormat

FORMATS = [PackedFormat.BF16, PackedFormat.INT8, PackedFormat.INT4]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@every_isa
@pytest.mark.parametrize("format", FORMATS)
def test_a_mixture_has_the_bits_of_its_experts_one_by_one(
    isa: str, format: PackedFormat, rng: np.random.Generator
) -> None:
    num_experts, hidden, size = int(rng.integers(2, 9)), int(rng.integers(20, 90)), int(rng.integers(10, 60))
    own = kernels(isa, 2)
    gate_up = [PackedWeight(own, (2 * size, hidden), WeightRole.GATE_UP, format) for _ in range(num_experts)]
    down = [PackedWeight(own, (hidden, size), format=format) for _ in range(num_experts)]
    for matrix in (*gate_up, *down):
        matrix.load_rows(0, drawn(*matrix.shape))
    gate = Gate(int(rng.integers(len(Gate))))
    biases = (drawn(num_experts, 2 * size), drawn(num_experts, hidden)) if rng.random() < 0.5 else None
    looped, mixed = LoopedExperts(gate_up, down, gate, biases), NativeExperts(own, gate_up, down, gate, biases)
    for tokens in (1, 2, 7, 60):
        count = int(rng.integers(1, num_experts + 1))
        x, weights = drawn(tokens, hidden + 3)[:, 1 : hidden + 1], torch.rand(tokens, count).bfloat16()
        chosen = torch.from_numpy(np.stack([rng.permutation(num_experts)[:count] for _ in range(tokens)]))
        got = mixed.mix(x, weights, chosen)
        assert torch.equal(got, looped.mix(x, weights, chosen))
        assert torch.equal(mixed.mix(x[:1], weights[:1], chosen[:1])[0], got[0])
    assert mixed.mix(x[:0], weights[:0], chosen[:0]).shape == (0, hidden)


@every_isa
def test_a_token_that_is_no_number_breaks_alone(isa: str, rng: np.random.Generator) -> None:
    own = kernels(isa)
    gate_up = [PackedWeight(own, (32, 20), WeightRole.GATE_UP) for _ in range(3)]
    down = [PackedWeight(own, (20, 16)) for _ in range(3)]
    for matrix in (*gate_up, *down):
        matrix.load_rows(0, drawn(*matrix.shape))
    x, weights = drawn(5, 20), torch.rand(5, 2).bfloat16()
    chosen = torch.from_numpy(np.stack([rng.permutation(3)[:2] for _ in range(5)]))
    x[2, 3] = torch.nan
    found = NativeExperts(own, gate_up, down).mix(x, weights, chosen)
    assert found[2].isnan().any()
    assert found[[0, 1, 3, 4]].isfinite().all()
