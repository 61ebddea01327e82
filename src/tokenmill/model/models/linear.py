"""Fused projections of one input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.model.kernels.protocol import Gate, Kernels, WeightRole
from tokenmill.model.models.targets import Order, Target, TargetScope
from tokenmill.model.sharding.collective import ALONE, Collective
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.adapters import AdaptedLayer
    from tokenmill.platform.arrays import Array


class Linear:
    """`y = x W^T + b` for one or several projections of the same input, their rows stacked in one matrix.

    Each of several ranks has some of the outputs or, in the second of a pair of matrices, perhaps some of the inputs.

    Attributes:
        parts: role of each projection in a table of names -> this rank's part of its outputs.
        inputs: this rank's part of the inputs.
        weight: [sum of part sizes, inputs].
        bias: [sum of part sizes]; None: absent, or another rank adds it.
    """

    __slots__ = ("_collective", "_has_bias", "_unbiased", "bias", "inputs", "parts", "weight")

    def __init__(
        self,
        inputs: int | Part,
        parts: Mapping[str, Part],
        bias: bool,
        kernels: Kernels,
        role: WeightRole = WeightRole.LINEAR,
        collective: Collective = ALONE,
        unbiased: Collection[str] = (),
    ) -> None:
        """Make the parameters.

        Args:
            inputs: their number, or this rank's part of them.
            parts: in the order of the stacked rows.
            collective: gathers the outputs of all ranks; without one each keeps its own.
            unbiased: projections without a bias beside others that have one.
        """
        size = sum(part.count for part in parts.values())
        self.parts = parts
        self.inputs = Part.whole(inputs) if isinstance(inputs, int) else inputs
        self.weight = kernels.linear_weight(
            size, self.inputs.count, role, {name: part.count for name, part in parts.items()}
        )
        self._has_bias, self._unbiased = bias, unbiased
        self.bias = kernels.vector(size) if bias and self.inputs.start == 0 else None
        self._collective = collective

    @property
    def columns(self) -> Part:
        """This rank's part of the outputs; with several projections, that of the first."""
        return next(iter(self.parts.values()))

    @property
    def role(self) -> str:
        """Role of its first projection, the name that adapters use."""
        return next(iter(self.parts))

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Multiply: [T, inputs] -> [T, sum of part sizes], or the outputs of all ranks."""
        own = self.weight.multiply(x, self.bias)
        if adapted is not None:
            own = adapted.add(self.role, x, own)
        return self._collective.behind(own, self.columns)

    def gated(self, x: torch.Tensor, gate: Gate, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Multiply by two parts of equal size (role GATE_UP): gate(first) * second, [T, inputs] -> [T, size]."""
        if adapted is None:
            own = self.weight.gated(x, self.bias, gate)
        else:
            own = adapted.gated(self.role, self.weight, x, self.bias, gate)
        return self._collective.between(own, self.columns)

    def targets(self, scope: TargetScope, orders: Mapping[str, Order] | None = None) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this layer; projections of one name are parts of one tensor.

        Such parts lie there in the order in which the table of names has their roles.

        Args:
            orders: of the rows of heads, by role; see `Order`.
        """
        is_stored_fused = len({scope.names[role] for role in self.parts}) < len(self.parts)
        size, start = sum(part.total for part in self.parts.values()), 0
        begins, stored = dict[str, int](), 0
        for role in (name for name in scope.names if name in self.parts):
            begins[role], stored = stored, stored + self.parts[role].total
        for role, own in self.parts.items():
            part = Part(begins[role] + own.start, own.count, size) if is_stored_fused else own
            order = (orders or {}).get(role, ())
            yield scope.matrix(role, self.weight, start, part, self.inputs, order)
            if role in self._unbiased:
                _clear(self.bias, start, own.count)
            elif self.bias is not None:
                yield scope.vector(role, self.bias[start : start + own.count], "bias", part, order)
            elif self._has_bias:
                yield scope.vector_elsewhere(role, part.total, "bias")
            start += own.count


def _clear(bias: Array | None, start: int, count: int) -> None:
    """Set a part of a bias to 0. One that lies in an arena is 0 already, and may not be written to."""
    part = None if bias is None else bias[start : start + count]
    if part is not None and (not isinstance(part, np.ndarray) or part.any()):
        part[...] = 0


def second_linear(
    role: str,
    inner: Part,
    size: int,
    bias: bool,
    kernels: Kernels,
    collective: Collective,
    use: WeightRole = WeightRole.LINEAR,
) -> Linear:
    """Make the second of a pair of matrices, with `size` outputs in all. `inner`: this rank's outputs of the first."""
    inputs, outputs = collective.shard.second(inner, size)
    return Linear(inputs, {role: outputs}, bias, kernels, use, collective)
