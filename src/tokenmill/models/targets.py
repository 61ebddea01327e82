"""The checkpoint tensors that fill a decoder: its parts know their weights' roles, the family's table their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.kernels.protocol import LinearWeight
from tokenmill.models.weight_names import WeightKey
from tokenmill.parallel.shard import Part


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a checkpoint must have, and where its values go.

    Attributes:
        name: what the family's checkpoints call it.
        shape: of all of it.
        part: which of its rows are wanted; none where it is another rank's. columns: which numbers of these; None: all.
        fill: takes the values of these: floats of any dtype, and for a matrix also `QuantizedRows`.
    """

    key: WeightKey
    name: str
    shape: tuple[int, ...]
    part: Part
    fill: Callable[[Any], object]
    columns: Part | None = None

    @property
    def is_matrix(self) -> bool:
        """A weight that may be stored quantized; the others are vectors."""
        return len(self.shape) == 2

    def wanted(self, values: torch.Tensor) -> torch.Tensor:
        """Of all values those that `fill` takes."""
        rows = values[self.part.start : self.part.stop]
        return rows if self.columns is None else rows[:, self.columns.start : self.columns.stop]

    def unwanted(self) -> Target:
        """The same where it is another rank's."""
        return dataclasses.replace(self, part=Part(0, 0, self.part.total), fill=lambda values: None)


@dataclass(frozen=True, slots=True)
class TargetScope:
    """Makes the targets of a layer or an expert, or of what is outside of all layers."""

    names: Mapping[str, str]
    layer: int | None = None
    expert: int | None = None

    def vector(self, role: str, vector: torch.Tensor, kind: str = "weight", part: Part | None = None) -> Target:
        """A bias or norm weight (or a view of a part of one). `part`: which part of the stored one it is; None: all."""
        return self._target(role, kind, (), part or Part.whole(len(vector)), vector.copy_)

    def matrix(
        self, role: str, matrix: LinearWeight, start: int = 0, part: Part | None = None, columns: Part | None = None
    ) -> Target:
        """The rows of a matrix from `start` on. `part`, `columns`: which of the stored ones these are; None: all."""
        out_size, in_size = matrix.shape
        part, columns = part or Part.whole(out_size - start), columns or Part.whole(in_size)
        target = self._target(role, "weight", (columns.total,), part, lambda values: matrix.load_rows(start, values))
        return target if columns.is_whole else dataclasses.replace(target, columns=columns)

    def elsewhere(self, role: str, shape: tuple[int, int]) -> Target:
        """A matrix of which this rank has nothing."""
        return self._target(role, "weight", shape[1:], Part.whole(shape[0]), lambda values: None).unwanted()

    def vector_elsewhere(self, role: str, size: int, kind: str) -> Target:
        """A vector that is another rank's."""
        return self._target(role, kind, (), Part.whole(size), lambda values: None).unwanted()

    def _target(self, role: str, kind: str, row: tuple[int, ...], part: Part, fill: Callable[[Any], object]) -> Target:
        key = WeightKey(role, self.layer, self.expert, kind)
        return Target(key, key.name(self.names), (part.total, *row), part, fill)
