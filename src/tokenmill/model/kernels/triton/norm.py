"""RMSNorm and LayerNorm, with and without the addition of a residual: one program per row, one pass over memory.

Estimate, not measured: 4 bytes a number, 8 with the addition, and 20 instructions; 256 rows of 1,024 are 2.1 MB, half a
microsecond on an H200, less than a launch costs. The weight is loaded before the kernel in front has ended. For a
product of eight-bit floats, one byte and 25 instructions a number more replace a launch that reads the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.triton.fp8 import RoundedRows, round_row
from tokenmill.model.kernels.triton.launch import dependent, follow


@triton.jit
def _rms_norm(
    x,
    delta,
    weight,
    output,
    rounded,
    scales,
    eps,
    scale,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    follow(PDL)
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(delta + row * SIZE + columns, mask=inside, other=0.0)
        # Rounded to the model's dtype before the norm: the sum is what the next layer adds to.
        values = (values.to(tl.float32) + added.to(tl.float32) * scale).to(values.dtype)
        tl.store(x + row * SIZE + columns, values, mask=inside)
    wide = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if IS_OFFSET:
        result = (wide * factor * (1.0 + factors)).to(values.dtype)
    else:
        normed = (wide * factor).to(values.dtype).to(tl.float32)
        result = (normed * factors).to(values.dtype)
    tl.store(output + row * SIZE + columns, result, mask=inside)
    if ROUNDS:
        numbers, own = round_row(result.to(tl.float32))
        tl.store(rounded + row * SIZE + columns, numbers, mask=inside)
        tl.store(scales + row, own)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    is_offset: bool = False,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """Return the RMSNorm of x [T, size] contiguous, times the weight; see `Kernels.rms_norm`.

    Args:
        rounded: also takes the result rounded to eight bits.
    """
    return _launch(x, None, (weight, eps, is_offset), 1.0, rounded)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    is_offset: bool = False,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """Add scale * delta to x in place and return the norm of x, as `rms_norm`; x and delta [T, size] contiguous."""
    return _launch(x, delta, (weight, eps, is_offset), scale, rounded)


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: tuple[torch.Tensor, float, bool],
    scale: float,
    rounded: RoundedRows | None,
) -> torch.Tensor:
    output, (weight, eps, is_offset) = torch.empty_like(x), norm
    room = (output, output) if rounded is None else rounded.make(output)
    if x.shape[0]:
        width = triton.next_power_of_2(x.shape[1])
        warps = min(max(width // 512, 1), 8)
        _rms_norm[(x.shape[0],)](
            *(x, delta, weight, output, *room, eps, scale),
            *(x.shape[1], width, delta is not None, rounded is not None, is_offset),
            num_warps=warps,
            **dependent(x),
        )
    return output


@triton.jit
def _layer_norm(
    x, delta, weight, bias, output, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(delta + row * SIZE + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(x + row * SIZE + columns, values, mask=inside)
    wide = values.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / SIZE, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    offsets = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, (centred * factor * factors + offsets).to(values.dtype), mask=inside)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, delta: torch.Tensor | None = None
) -> torch.Tensor:
    """Add `delta` to x [T, size] in place, if given; return the LayerNorm in float32, rounded once; all contiguous."""
    output = torch.empty_like(x)
    if x.shape[0]:
        width = triton.next_power_of_2(x.shape[1])
        tensors, sizes = (x, delta, weight, bias, output), (x.shape[1], width, delta is not None)
        _layer_norm[(x.shape[0],)](*tensors, eps, *sizes, num_warps=min(max(width // 512, 1), 8), **dependent(x))
    return output
