"""Weights of the norms of heads, and angles of their rotary embedding, which attention applies; see `torch_heads`.

They are of the kind that their kernels make: NumPy arrays, of bfloat16 the bits, or tensors. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tokenmill.model.kernels.operands import contiguous
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import Array

CosSin: TypeAlias = "tuple[Any, Any]"
"""cos and sin of a step's tokens."""


class HeadNorms(msgspec.Struct, frozen=True):
    """RMSNorm over each head of q and k, before the rotary embedding: weights [head_dim]; see `Kernels.rms_norm`.

    Attributes:
        v: weight for the values, if they are normed too.
    """

    q: Array
    k: Array
    eps: float
    are_offsets: bool = False
    v: Array | None = None


class RotaryTables(msgspec.Struct, frozen=True, eq=False):
    """cos and sin of the angles of every position, [max_position, head_dim / 2] in the model's dtype."""

    cos: Array
    sin: Array

    @property
    def num_bytes(self) -> int:
        """Memory of both tables in bytes."""
        return self.cos.nbytes + self.sin.nbytes

    def lookup(self, positions: torch.Tensor) -> CosSin:
        """Return cos and sin for `rotate` at `positions` [T]: two tensors [T, 1, head_dim].

        The sign of the half rotation is folded into sin: x * cos + swap_halves(x) * [-sin, sin].
        """
        own = self.in_torch()
        return _both_halves(own.cos[positions], own.sin[positions])

    def lookup_axes(self, positions: torch.Tensor, axes: torch.Tensor) -> CosSin:
        """Do `lookup` where each frequency turns by one of several positions: positions [A, T], axes [head_dim / 2]."""
        return _both_halves(*self.in_torch().rows(positions, axes))

    def rows(self, positions: Array, axes: Array) -> CosSin:
        """Return cos and sin of `lookup_axes` as rows of the tables, [T, head_dim / 2] each."""
        columns = library_of(self.cos).arange(len(axes), "int64")
        places = contiguous(positions[axes].T)  # [T, head_dim / 2]
        return contiguous(self.cos[places, columns]), contiguous(self.sin[places, columns])

    def in_torch(self) -> RotaryTables:
        """Return the same tables as tensors over the same memory."""
        # Imported here: native kernels run where there is no torch.
        from tokenmill.model.kernels.stored_tensors import tensor_over

        return RotaryTables(tensor_over(self.cos), tensor_over(self.sin))


def _both_halves(cos: torch.Tensor, sin: torch.Tensor) -> CosSin:
    """Return cos twice, and sin with the sign of each half."""
    signed = sin.repeat(1, 2)
    signed[:, : sin.shape[1]].neg_()
    return cos.repeat(1, 2).unsqueeze(1), signed.unsqueeze(1)


class StepAngles:
    """The angles of a step's tokens, looked up once per table, when the first layer with that table asks.

    Args:
        positions: [T] int64; or [A, T] with `axes`, see `RotaryTables.lookup_axes`.
    """

    __slots__ = ("_axes", "_found", "_positions")

    def __init__(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> None:
        self._positions = positions
        self._axes = axes
        self._found: dict[RotaryTables, CosSin] = {}

    def angles_of(self, rotary: RotaryTables | None) -> CosSin | None:
        """Return cos and sin for `split_heads` in a layer with these tables; None without tables."""
        if rotary is None:
            return None
        if rotary not in self._found:
            axes = self._axes
            found = rotary.lookup(self._positions) if axes is None else rotary.lookup_axes(self._positions, axes)
            self._found[rotary] = found
        return self._found[rotary]
