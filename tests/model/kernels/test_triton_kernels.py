"""`TritonKernels` and the torch kernels: the same decoder operations, filled with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, same
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.protocol import Gate, WeightRole
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.kernels.triton import experts as stacked_experts
from tokenmill.model.kernels.triton.kernels import TritonKernels
from tokenmill.model.quantization.packed import Mxfp4Rows


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("role", list(WeightRole))
def test_a_matrix_does_what_the_torch_one_does(rng: np.random.Generator, is_invariant: bool, role: WeightRole) -> None:
    out_size, in_size, tokens = 2 * int(rng.integers(1, 40)), int(rng.integers(1, 70)), int(rng.integers(1, 9))
    rows, x = torch.randn(out_size, in_size), torch.randn(tokens, in_size).to(DEVICE)
    bias = torch.randn(out_size).to(DEVICE)
    want, got = (
        kernels.linear_weight(out_size, in_size, role)
        for kernels in (
            TorchKernels("float32", DEVICE),
            TritonKernels("float32", DEVICE, is_invariant=is_invariant),
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


def test_stacked_experts_equal_one_after_the_other(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        num_experts, hidden, size = int(rng.integers(2, 7)), int(rng.integers(1, 40)), int(rng.integers(1, 30))
        tokens, count = int(rng.integers(1, 20)), int(rng.integers(1, num_experts + 1))
        kind, has_biases = Gate(int(rng.integers(len(Gate)))), bool(rng.random() < 0.5)
        looped = TorchKernels("float32", DEVICE).experts(num_experts, hidden, size, kind, has_biases)
        stacked = TritonKernels("float32", DEVICE).experts(num_experts, hidden, size, kind, has_biases)
        for own, other in zip(looped.biases or (), stacked.biases or (), strict=True):
            other.copy_(own.normal_())
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
        with monkeypatch.context() as sorting:
            sorting.setattr(stacked_experts, "MOST_COMPARED", int(rng.choice([0, tokens * count - 1])))
            assert torch.equal(stacked.mix(x, weights, chosen), got), "rows found by a sort"


def test_stacked_experts_in_mxfp4_are_those_of_their_numbers(rng: np.random.Generator) -> None:
    num_experts, hidden, size, tokens, count = 4, 64, 32, 7, 2
    numbers = TritonKernels("float32", DEVICE).experts(num_experts, hidden, size, Gate.CLAMPED, has_biases=True)
    packed = TritonKernels("float32", DEVICE, mxfp4=True).experts(num_experts, hidden, size, Gate.CLAMPED, True)
    for own, other in zip(numbers.biases or (), packed.biases or (), strict=True):
        other.copy_(own.normal_())
    for expert in range(num_experts):
        for matrices in ("gate_up", "down"):
            ours, theirs = getattr(packed, matrices)[expert], getattr(numbers, matrices)[expert]
            shape = ours.shape[0], ours.shape[1] // 32
            rows = Mxfp4Rows(
                rng.integers(0, 256, (*shape, 16), dtype=np.uint8),
                rng.integers(118, 124, shape, dtype=np.uint8),
            )
            ours.load_rows(0, rows)
            theirs.load_rows(0, rows)
    x, weights = torch.randn(tokens, hidden, device=DEVICE), torch.rand(tokens, count, device=DEVICE)
    chosen = torch.from_numpy(np.stack([rng.permutation(num_experts)[:count] for _ in range(tokens)])).to(DEVICE)
    assert same(packed.mix(x, weights, chosen), numbers.mix(x, weights, chosen))
    torch.testing.assert_close(packed.one(1, x), numbers.one(1, x))
    with pytest.raises(InvalidCheckpoint, match="in groups of 32 numbers"):
        packed.down[0].load_rows(0, torch.randn(hidden, size))
