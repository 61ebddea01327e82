"""Experts in eight-bit floats: a mixture of their numbers, with activations as they are or rounded, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, same
from tokenmill.model.kernels import torch_kernels
from tokenmill.model.kernels.fp8 import FP8, quantize_rows
from tokenmill.model.kernels.measuring import MeasuringKernels
from tokenmill.model.kernels.protocol import Experts, Gate
from tokenmill.model.kernels.triton import expert_matrices
from tokenmill.model.kernels.triton import fp8 as triton_fp8
from tokenmill.model.kernels.triton.few_rows import FEWEST_ROWS
from tokenmill.model.kernels.triton.kernels import TritonKernels

Sizes = tuple[int, int, int]
Matrices = list[tuple[torch.Tensor, torch.Tensor]]


def drawn_matrices(sizes: Sizes) -> Matrices:
    """Gate with up, and down, of each expert. `sizes`: experts, hidden size, and size of their middle."""
    num_experts, hidden, size = sizes
    shapes = (2 * size, hidden), (hidden, size)
    return [tuple(torch.randn(shape) * shape[1] ** -0.5 for shape in shapes) for _ in range(num_experts)]


def fill(experts: Experts, matrices: Matrices) -> None:
    for expert, (gate_up, down) in enumerate(matrices):
        size = down.shape[1]
        experts.gate_up[expert].load_rows(0, gate_up[:size])
        experts.gate_up[expert].load_rows(size, gate_up[size:])
        experts.down[expert].load_rows(0, down)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows in eight-bit floats, and back."""
    values, scales = quantize_rows(rows)
    return values.float() * scales


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    experts: tuple[Matrices, Any, Gate],
    meet: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A mixture token by token, on the CPU. `meet`: the form in which activations meet the rounded weights."""
    matrices, biases, gate = experts
    result = torch.zeros(x.shape)
    for token, row in enumerate(x.cpu()):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            gate_up, down = map(rounded, matrices[expert])
            first, second = (0.0, 0.0) if biases is None else (bias[expert].cpu() for bias in biases)
            inner = torch_kernels.gated(meet(row[None]) @ gate_up.t() + first, gate)
            result[token] += weight * (meet(inner) @ down.t() + second)[0]
    return result


@pytest.mark.parametrize("gate", list(Gate))
def test_a_mixture_is_that_of_the_rounded_weights(
    gate: Gate, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = int(rng.integers(2, 7)), int(rng.integers(1, 80)), int(rng.integers(1, 60))
    tokens, count, has_biases = int(rng.integers(1, 20)), int(rng.integers(1, sizes[0] + 1)), bool(rng.random() < 0.5)
    experts = TritonKernels("float32", DEVICE, fp8=True).experts(*sizes, gate, has_biases)
    for bias in experts.biases or ():
        bias.normal_()
    matrices = drawn_matrices(sizes)
    fill(experts, matrices)
    x, weights = torch.randn(tokens, sizes[1]).to(DEVICE), torch.rand(tokens, count).to(DEVICE)
    chosen = torch.from_numpy(np.stack([rng.permutation(sizes[0])[:count] for _ in range(tokens)])).to(DEVICE)
    parts = matrices, experts.biases, gate
    want = mixture(x, weights, chosen, parts, lambda rows: rows)
    got = experts.mix(x, weights, chosen)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    assert experts.mix(x[:0], weights[:0], chosen[:0]).shape == (0, sizes[1])
    alone = mixture(x[:1], torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int64), parts, lambda rows: rows)
    torch.testing.assert_close(experts.one(1, x[:1]).cpu(), alone, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(expert_matrices, "MOST_WIDENED", 0)
    want_rounded = mixture(x, weights, chosen, parts, rounded)
    got_rounded = experts.mix(x, weights, chosen).cpu()
    # A number of the middle that lies between two of eight bits may go to either.
    near = (got_rounded - want_rounded).norm() / want_rounded.norm()
    assert near < 0.01 or near < 0.5 * (want - want_rounded).norm() / want_rounded.norm()


def test_few_rows_of_an_expert_meet_its_weights_as_they_are_and_many_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, tokens = (3, 32, 16), 2 * FEWEST_ROWS
    kernels = TritonKernels(str(HALF).removeprefix("torch."), DEVICE, fp8=True)
    experts = kernels.experts(*sizes)
    fill(experts, drawn_matrices(sizes))
    chosen = torch.randint(0, sizes[0], (tokens, 1), device=DEVICE)
    x, weights = torch.randn(tokens, sizes[1]).to(DEVICE, HALF), torch.ones(tokens, 1, dtype=HALF, device=DEVICE)
    norm_weight = kernels.vector(sizes[1]).fill_(1.0)
    calls: list[tuple[int, ...]] = []

    def quantize(rows: torch.Tensor, original: Any = triton_fp8.quantize_rows) -> Any:
        calls.append(tuple(rows.shape))
        return original(rows)

    monkeypatch.setattr(triton_fp8, "quantize_rows", quantize)
    normed = kernels.rms_norm(x, norm_weight, 1e-6)
    experts.mix(normed, weights, chosen)
    assert calls == []
    monkeypatch.setattr(expert_matrices, "MOST_WIDENED", tokens // sizes[0])
    first = experts.mix(kernels.rms_norm(x, norm_weight, 1e-6), weights, chosen)
    assert calls == [(tokens, sizes[2])], "those behind the gate: the norm has rounded the others"
    assert same(experts.mix(normed.clone(), weights, chosen), first)
    assert calls[1:] == [(tokens, sizes[1]), (tokens, sizes[2])]


def test_experts_stored_in_mxfp4_stay_so_beside_layers_in_eight_bit_floats() -> None:
    kernels = TritonKernels("bfloat16", DEVICE, fp8=True, mxfp4=True)
    assert kernels.experts(2, 64, 32).down[0].weight.dtype == torch.uint8
    assert kernels.linear_weight(64, 32).weight.dtype == FP8


def test_their_memory_is_counted() -> None:
    num_experts, hidden, size = 4, 96, 40
    found = []
    for is_fp8 in (False, True):
        measuring = MeasuringKernels(TritonKernels("bfloat16", DEVICE, fp8=is_fp8))
        measuring.experts(num_experts, hidden, size)
        found.append(measuring.num_bytes)
    numbers = num_experts * 3 * hidden * size
    assert found == [2 * numbers, numbers + 4 * num_experts * (2 * size + hidden)]
