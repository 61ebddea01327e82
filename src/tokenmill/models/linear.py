"""Fused projections of one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tokenmill.kernels.adapters import AdaptedLayer
from tokenmill.kernels.protocol import Kernels, WeightRole
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import ALONE, Collective
from tokenmill.parallel.shard import Part


class Linear:
    """`y = x W^T + b` for one or several projections of the same input, their rows stacked in one matrix.

    Attributes:
        parts: role of each projection in a table of names -> which of its outputs are this rank's.
        weight: [sum of part sizes, in_size].
        bias: [sum of part sizes], or None.
    """

    __slots__ = ("_collective", "bias", "parts", "weight")

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, Part],
        bias: bool,
        kernels: Kernels,
        role: WeightRole = WeightRole.LINEAR,
        collective: Collective = ALONE,
    ) -> None:
        """Make the parameters.

        Args:
            parts: in the order of the stacked rows.
            collective: puts the outputs of all ranks together; without one they stay where they are.
        """
        size = sum(part.count for part in parts.values())
        self.parts = parts
        self.weight = kernels.linear_weight(size, in_size, role)
        self.bias = kernels.vector(size) if bias else None
        self._collective = collective

    @property
    def columns(self) -> Part:
        """Which of the outputs of all ranks are this one's; of several projections, of the first."""
        return next(iter(self.parts.values()))

    @property
    def role(self) -> str:
        """The role of its first projection, by which adapters call it."""
        return next(iter(self.parts))

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """[T, in_size] -> [T, sum of part sizes], or the outputs of all ranks."""
        own = self.weight.multiply(x, self.bias)
        if adapted is not None:
            own = adapted.add(self.role, x, own)
        return self._collective.columns(own, self.columns)

    def silu_and_mul(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Of two parts of equal size: silu(first) * second, [T, in_size] -> [T, size] (role GATE_UP)."""
        if adapted is None:
            own = self.weight.silu_and_mul(x, self.bias)
        else:
            own = adapted.silu_and_mul(self.role, self.weight, x, self.bias)
        return self._collective.columns(own, self.columns)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        start = 0
        for role, part in self.parts.items():
            yield scope.matrix(role, self.weight, start, part)
            if self.bias is not None:
                yield scope.vector(role, self.bias[start : start + part.count], "bias", part)
            start += part.count
