"""The checkpoint tensors that fill a decoder: its parts know their weights' roles, the family's table their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.kernels.protocol import LinearWeight
from tokenmill.models.weight_names import WeightKey


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a checkpoint must have, and where its values go.

    Attributes:
        name: what the family's checkpoints call it.
        fill: takes the values, [*shape]: floats of any dtype, and for a matrix also `QuantizedRows`.
    """

    key: WeightKey
    name: str
    shape: tuple[int, ...]
    fill: Callable[[Any], object]

    @property
    def is_matrix(self) -> bool:
        """A weight that may be stored quantized; the others are vectors."""
        return len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class TargetScope:
    """Makes the targets of a layer or an expert, or of what is outside of all layers."""

    names: Mapping[str, str]
    layer: int | None = None
    expert: int | None = None

    def vector(self, role: str, vector: torch.Tensor, kind: str = "weight") -> Target:
        """A bias or norm weight (or a view of a part of one)."""
        return self._target(role, kind, tuple(vector.shape), vector.copy_)

    def matrix(self, role: str, matrix: LinearWeight, start: int = 0, num_rows: int | None = None) -> Target:
        """Rows [start, start + num_rows) of a matrix; without a number, all from `start` on."""
        out_size, in_size = matrix.shape
        shape = (out_size - start if num_rows is None else num_rows, in_size)
        return self._target(role, "weight", shape, lambda values: matrix.load_rows(start, values))

    def _target(self, role: str, kind: str, shape: tuple[int, ...], fill: Callable[[Any], object]) -> Target:
        key = WeightKey(role, self.layer, self.expert, kind)
        return Target(key, key.name(self.names), shape, fill)
