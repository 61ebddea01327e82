"""The checkpoint tensors that fill a decoder: its parts know their weights' roles, the family's table their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from tokenmill.model.kernels.protocol import LinearWeight
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.packed import Rows, pick_rows
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import Array

    Values: TypeAlias = StoredArray | torch.Tensor


class Target(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint must have, and the place that its values fill.

    Attributes:
        name: its name in the family's checkpoints.
        shape: of all of it.
        part: the wanted rows; empty if it is another rank's. columns: the wanted numbers of these rows; None: all.
        is_mapped: the values stay in the file, which `fill` is given as memory that is mapped from it.
        fill: takes the values of these: floats of any dtype, stored or a tensor, and for a matrix also other `Rows`; of
            a mapped one, stored.
        matrix: the matrix that `fill` fills rows of; None: a vector, or another rank's.
    """

    key: WeightKey
    name: str
    shape: tuple[int, ...]
    part: Part
    fill: Callable[[Any], object]
    columns: Part | None = None
    is_mapped: bool = False
    matrix: LinearWeight | None = None

    @property
    def is_matrix(self) -> bool:
        """True for a weight that may be stored quantized; all others are vectors."""
        return len(self.shape) == 2

    def wanted(self, values: Values) -> Values:
        """Return the part of all values that `fill` takes."""
        rows = values[self.part.start : self.part.stop]
        return rows if self.columns is None else rows[:, self.columns.start : self.columns.stop]

    def unwanted(self) -> Target:
        """Return the same target with nothing wanted, for a tensor that is another rank's."""
        nothing = Part(0, 0, self.part.total)
        return msgspec.structs.replace(self, part=nothing, columns=None, fill=lambda values: None, matrix=None)


Order = Sequence[int]
"""In which order the rows of each head are held, by their places in a checkpoint; empty: as they are stored."""


class TargetScope(msgspec.Struct, frozen=True):
    """Makes the targets of a layer or an expert, or of the parts outside of all layers."""

    names: Mapping[str, str]
    layer: int | None = None
    expert: int | None = None

    def vector(
        self, role: str, vector: Array, kind: str = "weight", part: Part | None = None, order: Order = ()
    ) -> Target:
        """Make the target of a bias or norm weight (or of a view of a part of one).

        Args:
            part: the part of the stored vector that it is; None: all.
            order: see `Order`.
        """

        def fill(values: Values) -> None:
            _set(vector, values[_every(order, len(values))] if order else values)

        return self._target(role, kind, (), part or Part.whole(len(vector)), fill)

    def matrix(
        self,
        role: str,
        matrix: LinearWeight,
        start: int = 0,
        part: Part | None = None,
        columns: Part | None = None,
        order: Order = (),
    ) -> Target:
        """Make the target of the rows of a matrix from `start` on.

        Args:
            part, columns: their place in the stored matrix; None: all.
            order: see `Order`.
        """
        out_size, in_size = matrix.shape
        part, columns = part or Part.whole(out_size - start), columns or Part.whole(in_size)

        def fill(rows: Rows | torch.Tensor) -> None:
            matrix.load_rows(start, pick_rows(rows, _every(order, rows.shape[0])) if order else rows)

        target = self._target(role, "weight", (columns.total,), part, fill, matrix)
        return target if columns.is_whole else msgspec.structs.replace(target, columns=columns)

    def picked(self, role: str, matrix: LinearWeight, start: int, picks: Sequence[int], total: int) -> Target:
        """Make the target of rows of a matrix from `start` on: those with these numbers of `total` stored ones, in
        order."""

        def fill(rows: Rows | torch.Tensor) -> None:
            matrix.load_rows(start, pick_rows(rows, picks))

        return self._target(role, "weight", matrix.shape[1:], Part.whole(total), fill, matrix)

    def filters(self, role: str, weight: Array) -> Target:
        """Make the target of a depthwise convolution's weight [C, K], which is stored as [C, 1, K]."""

        def fill(values: Values) -> None:
            _set(weight, values)

        return self._target(role, "weight", (1, weight.shape[1]), Part.whole(len(weight)), fill)

    def mapped(self, role: str, shape: tuple[int, int], take: Callable[[StoredArray], None]) -> Target:
        """Make the target of a table that is not loaded: `take` gets it mapped from its file."""

        return msgspec.structs.replace(
            self._target(role, "weight", shape[1:], Part.whole(shape[0]), take), is_mapped=True
        )

    def elsewhere(self, role: str, shape: tuple[int, int]) -> Target:
        """Make the target of a matrix of which this rank has nothing."""
        return self._target(role, "weight", shape[1:], Part.whole(shape[0]), lambda values: None).unwanted()

    def vector_elsewhere(self, role: str, size: int, kind: str) -> Target:
        """Make the target of a vector that is another rank's."""
        return self._target(role, kind, (), Part.whole(size), lambda values: None).unwanted()

    def _target(
        self,
        role: str,
        kind: str,
        row: tuple[int, ...],
        part: Part,
        fill: Callable[[Any], object],
        matrix: LinearWeight | None = None,
    ) -> Target:
        key = WeightKey(role, self.layer, self.expert, kind)
        return Target(key, key.name(self.names), (part.total, *row), part, fill, matrix=matrix)


def _every(order: Order, num_rows: int) -> list[int]:
    """Return the order of one head repeated for all heads."""
    return [head + row for head in range(0, num_rows, len(order)) for row in order]


def _set(vector: Array, values: Values) -> None:
    """Set a vector, or all filters, to values of as many numbers."""
    if isinstance(vector, np.ndarray) and isinstance(values, StoredArray):
        rounded = values.float32() if vector.dtype == np.float32 else values.bfloat16()
        vector[...] = rounded.reshape(vector.shape)
        return
    # Imported here: native kernels run where there is no torch.
    from tokenmill.model.kernels.stored_tensors import fill_vector

    fill_vector(vector, values)
