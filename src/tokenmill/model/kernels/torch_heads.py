"""Norms and rotary embedding of heads in plain torch: the reference for the kernels that do both with the attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenmill.model.kernels.heads import CosSin, HeadNorms
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.kernels.torch_kernels import rms_norm

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


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
    q, k = _normed(qkv[:, :num_heads], norms.q, norms), _normed(qkv[:, num_heads:rotated], norms.k, norms)
    v = v if norms.v is None else _normed(v, norms.v, norms)
    return (q, k, v) if cos_sin is None else (rotate(q, cos_sin), rotate(k, cos_sin), v)


def _normed(x: torch.Tensor, weight: Array, norms: HeadNorms) -> torch.Tensor:
    return rms_norm(x, tensor_over(weight), norms.eps, norms.are_offsets)
