"""Norms and rotary embedding of the heads of q, k and v, between the projection and the attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.model.kernels.torch_kernels import rms_norm

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head of q and k, before the rotary embedding: weights [head_dim]; see `Kernels.rms_norm`.

    Attributes:
        v: weight for the values, if they are normed too.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    are_offsets: bool = False
    v: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTables:
    """cos and sin of the angles of every position, [max_position, head_dim / 2] in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of both tables in bytes."""
        return self.cos.nbytes + self.sin.nbytes

    def lookup(self, positions: torch.Tensor) -> CosSin:
        """Return cos and sin for `rotate` at `positions` [T]: two tensors [T, 1, head_dim].

        The sign of the half rotation is folded into sin: x * cos + swap_halves(x) * [-sin, sin].
        """
        return self._both_halves(self.cos[positions], self.sin[positions])

    def lookup_axes(self, positions: torch.Tensor, axes: torch.Tensor) -> CosSin:
        """Do `lookup` where each frequency turns by one of several positions: positions [A, T], axes [head_dim / 2]."""
        return self._both_halves(*self.rows(positions, axes))

    def rows(self, positions: torch.Tensor, axes: torch.Tensor) -> CosSin:
        """Return cos and sin of `lookup_axes` as rows of the tables, [T, head_dim / 2] each."""
        columns = torch.arange(len(axes), device=axes.device)
        places = positions[axes].T.contiguous()  # [T, head_dim / 2]
        return self.cos[places, columns], self.sin[places, columns]

    @staticmethod
    def _both_halves(cos: torch.Tensor, sin: torch.Tensor) -> CosSin:
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


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


def rotate(x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] in place; the second half of a head is paired with the first."""
    cos, sin = cos_sin
    first, second = x.chunk(2, -1)
    swapped = torch.cat((second, first), -1).mul_(sin)
    return x.mul_(cos).add_(swapped)


def split_heads(
    qkv: torch.Tensor, heads: tuple[int, int], norms: HeadNorms | None, cos_sin: CosSin | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the fused projection of T tokens into q, k and v, each [T, heads, head_dim]; norm and rotate q and k.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten.
        heads: num_heads, num_kv_heads.
        cos_sin: cos and sin from `StepAngles`; None for no rotation.
    """
    num_heads, num_kv_heads = heads
    rotated = num_heads + num_kv_heads
    qkv = qkv.view(qkv.shape[0], rotated + num_kv_heads, -1)
    v = qkv[:, rotated:]
    if norms is None:
        # One rotation for q and k: their heads lie side by side.
        both = qkv[:, :rotated] if cos_sin is None else rotate(qkv[:, :rotated], cos_sin)
        q, k = both.split((num_heads, num_kv_heads), 1)
        return q, k, v
    q = rms_norm(qkv[:, :num_heads], norms.q, norms.eps, norms.are_offsets)
    k = rms_norm(qkv[:, num_heads:rotated], norms.k, norms.eps, norms.are_offsets)
    v = v if norms.v is None else rms_norm(v, norms.v, norms.eps, norms.are_offsets)
    return (q, k, v) if cos_sin is None else (rotate(q, cos_sin), rotate(k, cos_sin), v)
