"""Fused projections, and how their parts are called in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.kernels.protocol import Kernels, Matrix, MatrixRole


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a checkpoint must have, and where its values go.

    Attributes:
        fill: takes the values, [*shape]: floats of any dtype, and for a matrix also `QuantizedRows`.
    """

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Any], object]

    @property
    def is_matrix(self) -> bool:
        """A weight that may be stored quantized; the others are vectors."""
        return len(self.shape) == 2


def vector_target(name: str, vector: torch.Tensor) -> Target:
    """A bias or norm weight (or a view of a part of one)."""
    return Target(name, tuple(vector.shape), vector.copy_)


def matrix_target(name: str, matrix: Matrix, start: int = 0, num_rows: int | None = None) -> Target:
    """Rows [start, start + num_rows) of a matrix; without a number, all from `start` on."""
    out_size, in_size = matrix.shape
    shape = (out_size - start if num_rows is None else num_rows, in_size)
    return Target(name, shape, lambda values: matrix.fill(start, values))


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
        role: MatrixRole = MatrixRole.LINEAR,
    ) -> None:
        """Make the parameters.

        Args:
            parts: name of each projection in a checkpoint -> its output size, in the order of the stacked rows.
        """
        self.parts = parts
        self.weight = kernels.matrix(sum(parts.values()), in_size, role)
        self.bias = kernels.vector(sum(parts.values())) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T, sum of part sizes]."""
        return self.weight.multiply(x, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Of two parts of equal size: silu(first) * second, [T, in_size] -> [T, size] (role GATED)."""
        return self.weight.gated(x, self.bias)

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        start = 0
        for part, size in self.parts.items():
            yield matrix_target(f"{prefix}.{part}.weight", self.weight, start, size)
            if self.bias is not None:
                yield vector_target(f"{prefix}.{part}.bias", self.bias[start : start + size])
            start += size
