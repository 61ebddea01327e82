"""`TritonKernels` and the torch kernels: the same decoder operations, filled with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu import DEVICE, same
from tokenmill.kernels.protocol import Gate, WeightRole
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.kernels.triton.kernels import TritonKernels


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("role", list(WeightRole))
def test_a_matrix_does_what_the_torch_one_does(rng: np.random.Generator, is_invariant: bool, role: WeightRole) -> None:
    out_size, in_size, tokens = 2 * int(rng.integers(1, 40)), int(rng.integers(1, 70)), int(rng.integers(1, 9))
    rows, x = torch.randn(out_size, in_size), torch.randn(tokens, in_size).to(DEVICE)
    bias = torch.randn(out_size).to(DEVICE)
    want, got = (
        kernels.linear_weight(out_size, in_size, role)
        for kernels in (
            TorchKernels(torch.float32, DEVICE),
            TritonKernels(torch.float32, DEVICE, is_invariant=is_invariant),
        )
    )
    for matrix in (want, got):
        matrix.load_rows(0, rows[:1])
        matrix.load_rows(1, rows[1:])
    for one, other in (
        (got.multiply(x, bias), want.multiply(x, bias)),
        *((got.gated(x, bias, gate), want.gated(x, bias, gate)) for gate in Gate),
        (got.logits(x), want.logits(x)),
        (got.lookup(torch.tensor([0], device=DEVICE)), want.lookup(torch.tensor([0], device=DEVICE))),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.argmax(x), got.logits(x).argmax(-1))


def test_stacked_experts_equal_one_after_the_other(rng: np.random.Generator) -> None:
    for _ in range(3):
        num_experts, hidden, size = int(rng.integers(2, 7)), int(rng.integers(1, 40)), int(rng.integers(1, 30))
        tokens, count = int(rng.integers(1, 20)), int(rng.integers(1, num_experts + 1))
        looped = TorchKernels(torch.float32, DEVICE).experts(num_experts, hidden, size)
        stacked = TritonKernels(torch.float32, DEVICE).experts(num_experts, hidden, size)
        for expert in range(num_experts):
            gate, up, down = torch.randn(size, hidden), torch.randn(size, hidden), torch.randn(hidden, size)
            for experts in (looped, stacked):
                experts.gate_up[expert].load_rows(0, gate)
                experts.gate_up[expert].load_rows(size, up)
                experts.down[expert].load_rows(0, down)
        x, weights = torch.randn(tokens, hidden, device=DEVICE), torch.rand(tokens, count, device=DEVICE)
        chosen = torch.from_numpy(np.stack([rng.permutation(num_experts)[:count] for _ in range(tokens)])).to(DEVICE)
        got = stacked.mix(x, weights, chosen)
        torch.testing.assert_close(got, looped.mix(x, weights, chosen), rtol=1e-3, atol=1e-3)
        assert stacked.mix(x[:0], weights[:0], chosen[:0]).shape == (0, hidden)
        assert same(stacked.mix(x[:1], weights[:1], chosen[:1])[0], got[0])
