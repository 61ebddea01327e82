"""A mixture of experts in eight-bit floats on the device: against float64, and beside bfloat16 in graphs.

A dry run is in float32: Triton's interpreter has no products of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tools.gpu.machine import device_seconds
from tools.gpu.rows import Row

# Of the norm of a token's result; each step of the reference is rounded where the kernels round.
LARGEST_ERROR = 0.01
# Tokens that are compared.
MOST_COMPARED = 6


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer: how many, how many of them a token has, and their sizes."""

    experts: int
    each: int
    hidden: int
    size: int

    def num_bytes(self, used: float, is_fp8: bool) -> float:
        """Bytes of so many experts, with their scales."""
        numbers, outputs = 3 * self.hidden * self.size, 2 * self.size + self.hidden
        return used * (numbers + 4 * outputs if is_fp8 else 2 * numbers)


QWEN3_30B_A3B, DRY = Mixture(128, 8, 2048, 768), Mixture(2, 2, 48, 32)
# Many tokens are rounded, few are not. Each number has several drawings of experts in one graph.
TOKENS, DRY_TOKENS = {1: 8, 8: 8, 64: 8, 256: 4, 8192: 1}, {3: 1, 70: 1}


def compare_mixtures(mixture: Mixture, tokens: dict[int, int], platform: Any, copy_bytes: float) -> Iterator[Row]:
    """A row for each number of tokens.

    Args:
        tokens: their numbers, each with its number of drawings.
        copy_bytes: bytes per second that the device reads and writes.
    """
    from tokenmill.model.kernels.triton.kernels import TritonKernels

    device, sizes = platform.device, (mixture.experts, mixture.hidden, mixture.size)
    dtype = torch.bfloat16 if platform.name == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    plain, layer = (TritonKernels(name, device, fp8=is_fp8).experts(*sizes) for is_fp8 in (False, True))
    for ours, theirs in ((plain.gate_up, layer.gate_up), (plain.down, layer.down)):
        for dense, rounded in zip(ours, theirs, strict=True):
            dense.weight.normal_(std=dense.shape[1] ** -0.5)
            rounded.load_rows(0, dense.weight)
    for count, drawings in tokens.items():
        x = torch.randn(count, mixture.hidden, device=device).to(dtype)
        weights = torch.rand(count, mixture.each, device=device).softmax(-1).to(dtype)
        chosen = [torch.rand(count, mixture.experts, device=device).topk(mixture.each).indices for _ in range(drawings)]
        picked = torch.randperm(count, device=device)[:MOST_COMPARED].tolist()
        results = layer.mix(x, weights, chosen[0])[picked].double()
        asked = x[picked], weights[picked], chosen[0][picked]
        errors = [
            largest_error(results, expected(experts, *asked, rounds))
            for experts, rounds in ((layer, is_rounded(mixture, count)), (plain, False))
        ]
        row: Row = {"what": f"fp8 experts, {count} tokens", "error": errors[0], "with_rounding": errors[1]}
        row |= {"passed": errors[0] < LARGEST_ERROR}
        fp8, half = (graph_us(experts.mix, x, weights, chosen, platform) for experts in (layer, plain))
        used = sum(len(one.unique()) for one in chosen) / drawings
        floors = [1e6 * mixture.num_bytes(used, is_fp8) / copy_bytes for is_fp8 in (True, False)]
        row |= {"fp8_us": fp8, "of_it_bytes_us": floors[0], "bf16_us": half, "of_these_bytes_us": floors[1]}
        row |= {"tflops": 6 * count * mixture.each * mixture.hidden * mixture.size / fp8 / 1e6, "speedup": half / fp8}
        yield row


def is_rounded(mixture: Mixture, count: int) -> bool:
    """Return True if the activations of so many tokens are rounded too."""
    from tokenmill.model.kernels.triton.expert_matrices import MOST_WIDENED

    return count * mixture.each > MOST_WIDENED * mixture.experts


def expected(experts: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, rounds: bool) -> torch.Tensor:
    """A mixture in float64, token by token; `rounds`: activations meet the weights in eight-bit floats."""
    from tokenmill.model.kernels.fp8 import quantize_rows
    from tokenmill.model.kernels.torch_kernels import gated

    def product(rows: torch.Tensor, matrix: Any) -> torch.Tensor:
        numbers, (values, scales) = matrix.weight.double(), quantize_rows(rows)
        numbers *= getattr(matrix, "scales", 1.0)
        return ((values.double() * scales if rounds else rows.double()) @ numbers.t()).to(rows.dtype)

    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            inner = gated(product(row[None], experts.gate_up[expert]))
            result[token] += weight * product(inner, experts.down[expert])[0].double()
    return result


def graph_us(
    mix: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, chosen: list[torch.Tensor], platform: Any
) -> float:
    """Microseconds of a mixture in a graph, on the average of the drawings."""
    graph = platform.capture(lambda: tuple(mix(x, weights, one) for one in chosen), platform.stream())
    return 1e6 * device_seconds(graph.replay, platform) / len(chosen)


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of a row from what it should be, as part of its norm."""
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
