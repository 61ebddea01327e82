"""Python wrappers of the native kernels that work row by row; their torch reference is in `torch_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenmill import _native


def rms_norm(
    native: _native.Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
    scale: float = 1.0,
    is_offset: bool = False,
) -> torch.Tensor:
    """Add `scale` * `delta` [T, size] to x [T, size] bfloat16 in place, if given, and return the norm of x.

    x and delta may have any row stride; each row is contiguous. See `Kernels.rms_norm` and `Kernels.add_rms_norm`.
    """
    count, size = x.shape
    assert x.dtype == weight.dtype == torch.bfloat16, f"norms are of bfloat16, not {x.dtype}"
    assert x.stride(1) == weight.stride(0) == 1, "a row is in one piece"
    out = x.new_empty(count, size)
    address, stride = 0, 0
    if delta is not None:
        assert delta.shape == x.shape and delta.dtype == x.dtype and delta.stride(1) == 1, "a delta is like x"
        address, stride = delta.data_ptr(), delta.stride(0)
    norm = weight.data_ptr(), is_offset, eps
    native.rms_norm(x.data_ptr(), x.stride(0), address, stride, scale, *norm, out.data_ptr(), count, size)
    return out


def layer_norm(
    native: _native.Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `delta` [T, size] to x [T, size] bfloat16 in place, if given, and return the LayerNorm of x."""
    count, size = x.shape
    assert x.dtype == weight.dtype == bias.dtype == torch.bfloat16, f"norms are of bfloat16, not {x.dtype}"
    assert x.stride(1) == weight.stride(0) == bias.stride(0) == 1, "a row is in one piece"
    out = x.new_empty(count, size)
    address, stride = 0, 0
    if delta is not None:
        assert delta.shape == x.shape and delta.dtype == x.dtype and delta.stride(1) == 1, "a delta is like x"
        address, stride = delta.data_ptr(), delta.stride(0)
    weights = weight.data_ptr(), bias.data_ptr()
    native.layer_norm(x.data_ptr(), x.stride(0), address, stride, *weights, eps, out.data_ptr(), count, size)
    return out


def gelu(native: _native.Kernels, x: torch.Tensor) -> torch.Tensor:
    """Apply GELU with tanh to x, contiguous bfloat16, in place."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), "numbers are bfloat16 in one piece"
    native.gelu(x.data_ptr(), x.numel())
    return x
