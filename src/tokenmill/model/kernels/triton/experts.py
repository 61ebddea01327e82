"""Experts as one stacked weight with grouped products: nothing is copied to the host, so a graph can capture them."""

from __future__ import annotations

from functools import cached_property

import torch

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.protocol import ExpertBiases, Gate, LinearWeight
from tokenmill.model.kernels.torch_kernels import TorchWeight, product
from tokenmill.model.kernels.triton.gate import gated
from tokenmill.model.kernels.triton.matmul import grouped_multiply
from tokenmill.model.quantization.packed import FP4, Mxfp4Rows, Rows


class ExpertRows(TorchWeight):
    """One expert's part of a stacked weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape[0], weight.shape[1]
        self.weight = weight
        self.num_bytes = weight.nbytes


class Mxfp4ExpertRows(TorchWeight):
    """One expert's part of a stacked weight in mxfp4."""

    def __init__(self, blocks: torch.Tensor, exponents: torch.Tensor) -> None:
        self.shape = blocks.shape[0], 2 * blocks.shape[1]
        self.weight = blocks
        self.num_bytes = blocks.nbytes + exponents.nbytes
        self._exponents = exponents

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Copy mxfp4 rows from row `start` on; refuse rows in any other format."""
        if not isinstance(rows, Mxfp4Rows):
            raise InvalidCheckpoint("experts in mxfp4 are shared by ranks in groups of 32 numbers: take another number")
        own = slice(start, start + rows.shape[0])
        self.weight[own].copy_(torch.from_numpy(rows.blocks).flatten(1))
        self._exponents[own].copy_(torch.from_numpy(rows.scales))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias with dequantized weights, for uses without a grouped product."""
        return product(x, numbers_of(self.weight, self._exponents).to(x.dtype), bias)


def numbers_of(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return mxfp4 as [n, in_size] float32: `Mxfp4Rows.dequantize` on a device.

    Args:
        blocks: [n, in_size / 2] uint8. exponents: [n, in_size / 32] uint8.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(*exponents.shape, 32)
    numbers = torch.tensor(FP4, device=blocks.device)[codes.int()]
    return torch.ldexp(numbers, exponents.int().sub_(127).unsqueeze(-1)).flatten(1)


class StackedExperts:
    """`Experts` whose matrices are stacked for grouped products.

    Args:
        is_mxfp4: the matrices are in mxfp4 and stay in it.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        like: torch.Tensor,
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
        is_mxfp4: bool = False,
    ) -> None:
        self.biases = biases
        self._gate = gate
        self._is_mxfp4 = is_mxfp4
        self._gate_up = _stacked(like, (num_experts, 2 * size, hidden_size), is_mxfp4)
        self._down = _stacked(like, (num_experts, hidden_size, size), is_mxfp4)
        self._bounds = torch.arange(num_experts + 1, device=like.device)

    @cached_property
    def gate_up(self) -> list[LinearWeight]:
        """Gate and up matrices of the experts: views of the stacked weight."""
        return self._matrices(self._gate_up)

    @cached_property
    def down(self) -> list[LinearWeight]:
        """Down matrices of the experts: views of the stacked weight."""
        return self._matrices(self._down)

    def _matrices(self, stacked: Stacked) -> list[LinearWeight]:
        weights, exponents = stacked
        if exponents is None:
            return [ExpertRows(weight) for weight in weights]
        return [Mxfp4ExpertRows(*pair) for pair in zip(weights, exponents, strict=True)]

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run x through one expert."""
        first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
        sums = self.gate_up[expert].multiply(x, first)
        return self.down[expert].multiply(gated(sums, self._gate), second)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts by two grouped products."""
        num_tokens, count = experts.shape
        experts, own_order = experts.sort(-1)
        weights = weights.gather(1, own_order)
        # Rows of the products: by expert, then by token.
        grouped, order = experts.flatten().sort(stable=True)
        starts = torch.searchsorted(grouped, self._bounds).to(torch.int32)
        weights_in, exponents_in = self._gate_up
        weights_out, exponents_out = self._down
        sums = grouped_multiply(x, weights_in, order // count, starts, exponents_in)
        if self.biases is not None:
            sums += self.biases[0][grouped]
        inner, rows = gated(sums, self._gate), torch.arange(len(order), device=x.device)
        outer = grouped_multiply(inner, weights_out, rows, starts, exponents_out)
        if self.biases is not None:
            outer += self.biases[1][grouped]
        by_token = torch.empty_like(outer).index_copy_(0, order, outer).view(num_tokens, count, x.shape[1])
        return (by_token.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


Stacked = tuple[torch.Tensor, torch.Tensor | None]
"""The matrices of all experts, and in mxfp4 their exponents."""


def _stacked(like: torch.Tensor, shape: tuple[int, int, int], is_mxfp4: bool) -> Stacked:
    if not is_mxfp4:
        return like.new_empty(shape), None
    num_experts, outputs, inputs = shape
    blocks = like.new_empty(num_experts, outputs, inputs // 2, dtype=torch.uint8)
    return blocks, like.new_empty(num_experts, outputs, inputs // 32, dtype=torch.uint8)
