"""Matrices packed for the native kernels whose rows have several formats, as projections of one input may in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.quantization.packed import PackedFormat, Rows, pick_rows
from tokenmill.platform.host_arrays import HostArrays
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    import torch

    from tokenmill._native import Kernels


class PartedWeight(PackedWeight):
    """A `PackedWeight` of parts, one below the other. It is multiplied whole, and neither gated nor looked up.

    Args:
        kernels: the native kernels that fill and multiply it.
        rows: formats of the parts, and their numbers of rows.
        has_memory: False for a matrix that is only measured.
        arena: see `PackedWeight`; the parts lie in it side by side.

    Attributes:
        parts: the first row of each, and its matrix.
    """

    def __init__(
        self,
        kernels: Kernels,
        in_size: int,
        rows: Sequence[tuple[PackedFormat, int]],
        has_memory: bool = True,
        arena: Arena | None = None,
    ) -> None:
        shape = sum(count for _, count in rows), in_size
        super().__init__(kernels, shape, WeightRole.LINEAR, rows[0][0], has_memory=False)
        measured = [PackedWeight(kernels, (count, in_size), format=format, has_memory=False) for format, count in rows]
        self.num_bytes = sum(part.num_bytes for part in measured)
        own: Arena | None = None
        if has_memory:
            memory = HostArrays().zeros((self.num_bytes,), "uint8") if arena is None else arena.take(self.num_bytes)
            own = Arena(memory)
        self.parts: list[tuple[int, PackedWeight]] = []
        start = 0
        for format, count in rows:
            part = PackedWeight(kernels, (count, in_size), format=format, has_memory=has_memory, arena=own)
            self.packed.add_part(part.packed)
            self.parts.append((start, part))
            start += count

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Pack rows from row `start` on, each into its part."""
        count = rows.shape[0]
        for first, part in self.parts:
            begin, end = max(start, first), min(start + count, first + part.shape[0])
            if begin < end:
                part.load_rows(begin - first, _slice(rows, begin - start, end - start))

    def lookup(self, ids: Any) -> Any:
        """Raise: rows of several formats are not looked up."""
        raise NotImplementedError("only vocabularies are looked up, and these have one format")


def _slice(rows: Rows | torch.Tensor, begin: int, end: int) -> Rows | torch.Tensor:
    if begin == 0 and end == rows.shape[0]:
        return rows
    if not isinstance(rows, get_args(Rows)):
        tensor: Any = rows
        return tensor[begin:end]
    return pick_rows(rows, range(begin, end))
