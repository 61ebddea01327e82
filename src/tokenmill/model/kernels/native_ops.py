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


def add_gated(native: _native.Kernels, sums: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Add x * sigmoid(gate) to sums in place; both [T, size] contiguous bfloat16, gate [T, 1]. Return the sums."""
    count, size = x.shape
    assert sums.shape == x.shape and gate.shape == (count, 1), "a gate for each row"
    assert sums.is_contiguous() and x.is_contiguous() and gate.is_contiguous(), "all are in one piece"
    assert sums.dtype == x.dtype == gate.dtype == torch.bfloat16, "numbers are bfloat16"
    ones, opened, rows = torch.ones_like(gate), torch.empty_like(gate), torch.arange(count)
    native.sigmoid_gate(ones.data_ptr(), 1, gate.data_ptr(), 1, opened.data_ptr(), count, 1)
    native.add_weighted(x.data_ptr(), opened.data_ptr(), rows.data_ptr(), sums.data_ptr(), count, size)
    return sums


def multiply(native: _native.Kernels, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x * y, [T, size] bfloat16, whose rows are each in one piece."""
    assert x.shape == y.shape and x.dtype == y.dtype == torch.bfloat16, "as many numbers of bfloat16"
    assert x.stride(1) == y.stride(1) == 1, "a row is in one piece"
    out = x.new_empty(x.shape)
    native.multiply_rows(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), out.data_ptr(), *x.shape)
    return out


def scaled_sum(
    native: _native.Kernels, x: torch.Tensor, factor: float, delta: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return (x + scale * delta) * factor, contiguous bfloat16, computed in place."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous(), "numbers are bfloat16 in one piece"
    address = 0
    if delta is not None:
        assert delta.shape == x.shape and delta.dtype == x.dtype and delta.is_contiguous(), "a delta is like x"
        address = delta.data_ptr()
    native.scaled_sum(x.data_ptr(), address, scale, factor, x.numel())
    return x


def route(
    native: _native.Kernels, logits: torch.Tensor, count: int, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `count` experts with the largest logits [T, experts] bfloat16; see `Kernels.route`."""
    tokens, experts = logits.shape
    assert logits.dtype == torch.bfloat16 and logits.stride(1) == 1, "a row of bfloat16 is in one piece"
    assert 1 <= count <= experts, "a token has experts, and each once"
    weights, ids = logits.new_empty(tokens, count), torch.empty(tokens, count, dtype=torch.int64)
    found = ids.data_ptr(), weights.data_ptr()
    native.route(logits.data_ptr(), logits.stride(0), tokens, experts, count, normalizes, *found)
    return weights, ids
