"""The experts of a mixture: a gated pair of projections each, and what sends every token to its own few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenmill.kernels.protocol import Matrix


class Experts(Protocol):
    """E experts, in the form that their kernels like.

    Attributes:
        gate_up: per expert [2 * size, hidden_size].
        down: per expert [hidden_size, size].
    """

    @property
    def gate_up(self) -> Sequence[Matrix]:
        """To be filled."""

    @property
    def down(self) -> Sequence[Matrix]:
        """To be filled."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, added in the order of their ids.

        Args:
            x: [T, hidden_size]. weights: [T, k] in x's dtype. experts: [T, k] int64, which ones.

        Returns:
            [T, hidden_size]; a token's result does not depend on the others.
        """


class LoopedExperts:
    """One expert after the other, each a product of its own: for kernels without grouped products."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Sequence[Matrix], down: Sequence[Matrix]) -> None:
        self.gate_up = gate_up
        self.down = down

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `Experts.mix`."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        inputs, scales = x[tokens], weights.flatten()[order].unsqueeze(1)
        counts = torch.bincount(experts.flatten(), minlength=len(self.down)).tolist()
        result = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                inner = self.gate_up[expert].gated(inputs[mine])
                result.index_add_(0, tokens[mine], self.down[expert].multiply(inner).mul_(scales[mine]))
                start += count
        return result
