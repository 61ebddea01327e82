"""Fused projections of one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tokenmill.kernels.protocol import Kernels, WeightRole
from tokenmill.models.targets import Target, TargetScope


class Linear:
    """`y = x W^T + b` for one or several projections of the same input, their rows stacked in one matrix.

    Attributes:
        weight: [sum of part sizes, in_size].
        bias: [sum of part sizes], or None.
    """

    __slots__ = ("bias", "parts", "weight")

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        kernels: Kernels,
        role: WeightRole = WeightRole.LINEAR,
    ) -> None:
        """Make the parameters.

        Args:
            parts: role of each projection in a table of names -> its output size, in the order of the stacked rows.
        """
        self.parts = parts
        self.weight = kernels.linear_weight(sum(parts.values()), in_size, role)
        self.bias = kernels.vector(sum(parts.values())) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T, sum of part sizes]."""
        return self.weight.multiply(x, self.bias)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Of two parts of equal size: silu(first) * second, [T, in_size] -> [T, size] (role GATE_UP)."""
        return self.weight.silu_and_mul(x, self.bias)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        start = 0
        for part, size in self.parts.items():
            yield scope.matrix(part, self.weight, start, size)
            if self.bias is not None:
                yield scope.vector(part, self.bias[start : start + size], "bias")
            start += size
