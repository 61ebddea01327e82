"""RMSNorm, with and without the addition of a residual: one program per row, one pass over memory.

Estimate, not measured: 4 bytes a number, 8 with the addition, and 20 instructions; 256 rows of 1,024 are 2.1 MB, half a
microsecond on an H200, less than a launch costs. The weight is on its way before the kernel in front has ended. For a
product of eight-bit floats one byte and 25 instructions a number more, in place of a launch that reads the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.fp8 import RoundedRows, round_row
from tokenmill.kernels.triton.launch import dependent, follow


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
    """See `Kernels.rms_norm`; x [T, size] contiguous.

    Args:
        rounded: takes the result in eight bits, too.
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
    """See `Kernels.add_rms_norm`, and `rms_norm`; x and delta [T, size] contiguous."""
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
