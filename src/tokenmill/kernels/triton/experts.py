"""Experts as one stacked weight, whose products run grouped: no copy to the host, so a graph can capture it."""

from __future__ import annotations

from functools import cached_property

import torch

from tokenmill.kernels.protocol import ExpertBiases, Gate, LinearWeight
from tokenmill.kernels.torch_kernels import TorchWeight
from tokenmill.kernels.triton.gate import gated
from tokenmill.kernels.triton.matmul import grouped_multiply


class ExpertRows(TorchWeight):
    """One expert's part of a stacked weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape[0], weight.shape[1]
        self.weight = weight
        self.num_bytes = weight.nbytes


class StackedExperts:
    """See `Experts`."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        like: torch.Tensor,
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        self.biases = biases
        self._gate = gate
        self._gate_up = like.new_empty(num_experts, 2 * size, hidden_size)
        self._down = like.new_empty(num_experts, hidden_size, size)
        self._bounds = torch.arange(num_experts + 1, device=like.device)

    @cached_property
    def gate_up(self) -> list[LinearWeight]:
        """See `Experts`."""
        return [ExpertRows(weight) for weight in self._gate_up]

    @cached_property
    def down(self) -> list[LinearWeight]:
        """See `Experts`."""
        return [ExpertRows(weight) for weight in self._down]

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """See `Experts.one`."""
        first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
        sums = self.gate_up[expert].multiply(x, first)
        return self.down[expert].multiply(gated(sums, self._gate), second)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `Experts.mix`."""
        num_tokens, count = experts.shape
        experts, own_order = experts.sort(-1)
        weights = weights.gather(1, own_order)
        # Rows of the products: by expert, then by token.
        grouped, order = experts.flatten().sort(stable=True)
        starts = torch.searchsorted(grouped, self._bounds).to(torch.int32)
        sums = grouped_multiply(x, self._gate_up, order // count, starts)
        if self.biases is not None:
            sums += self.biases[0][grouped]
        outer = grouped_multiply(gated(sums, self._gate), self._down, torch.arange(len(order), device=x.device), starts)
        if self.biases is not None:
            outer += self.biases[1][grouped]
        by_token = torch.empty_like(outer).index_copy_(0, order, outer).view(num_tokens, count, x.shape[1])
        return (by_token.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)
