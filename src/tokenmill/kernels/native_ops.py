"""Faces of the native kernels that work row by row; their torch reference is in `torch_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.sampling.batch import DrawGroup


def rms_norm(
    native: _native.Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float, update: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of x [T, size] bfloat16, after `update` [T, size] has been added to it in place; a new tensor.

    Rows may lie apart; each is in one piece. See `Kernels.rms_norm` and `Kernels.add_rms_norm`.
    """
    count, size = x.shape
    assert x.dtype == weight.dtype == torch.bfloat16, f"norms are of bfloat16, not {x.dtype}"
    assert x.stride(1) == weight.stride(0) == 1, "a row is in one piece"
    out = x.new_empty(count, size)
    address, stride = 0, 0
    if update is not None:
        assert update.shape == x.shape and update.dtype == x.dtype and update.stride(1) == 1, "an update is like x"
        address, stride = update.data_ptr(), update.stride(0)
    native.rms_norm(x.data_ptr(), x.stride(0), address, stride, weight.data_ptr(), eps, out.data_ptr(), count, size)
    return out


def ban(native: _native.Kernels, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the logits of all tokens whose bit is clear to -inf, in place, as `sampling.allowed` does.

    Args:
        logits: [S, V] float32.
        rows: [n] int64, rows of the logits, none twice.
        bits: [n, ceil(V / 32)] int32.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32 in one piece"
    assert rows.dtype == torch.int64 and rows.is_contiguous(), "rows are int64"
    count, size = len(rows), logits.shape[1]
    assert bits.dtype == torch.int32 and bits.is_contiguous() and bits.shape == (count, -(-size // 32)), "a bit a token"
    native.ban(logits.data_ptr(), logits.stride(0), size, count, rows.data_ptr(), bits.data_ptr())


def draw(native: _native.Kernels, logits: torch.Tensor, group: DrawGroup) -> torch.Tensor:
    """Draw as `sampling.draw` and `sampling.wide` do, from rows of logits that may hold NaN and infinities.

    Args:
        logits: [S, V] float32.
        group: which n of the rows, and how.

    Returns:
        [n] int64 token ids.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32 in one piece"
    numbers = (group.temperature, group.top_p, group.min_p, group.uniform)
    assert all(one.dtype == torch.float64 and one.is_contiguous() for one in numbers), "parameters are float64"
    counts = (group.indices, group.top_k)
    assert all(one.dtype == torch.int64 and one.is_contiguous() for one in counts), "rows and counts are int64"
    ids = torch.empty(len(group.indices), dtype=torch.int64)
    native.draw(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        len(ids),
        group.indices.data_ptr(),
        group.top_k.data_ptr(),
        group.temperature.data_ptr(),
        group.top_p.data_ptr(),
        group.min_p.data_ptr(),
        group.uniform.data_ptr(),
        ids.data_ptr(),
    )
    return ids
