"""Rows of activations as eight-bit floats with a scale each: `quantize_rows` of `kernels.fp8` in one launch, or none
where a norm precedes the product.

Estimate, not measured: 3 bytes and 25 instructions a number; 256 rows of 3,072 are 2.4 MB, half a microsecond on an
H200, less than a launch costs; torch's seven kernels move some 30 bytes a number and cost seven launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.fp8 import FP8
from tokenmill.model.kernels.triton.launch import dependent, follow


@triton.jit
def round_row(x):
    """A row [WIDTH] float32 as e4m3, in uint8, and its scale. Made of float32's bits: exact on every GPU, and in the
    interpreter."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-12), 448.0)
    # A maximum passes over NaN; torch's does not.
    scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
    x = tl.div_rn(x, scale)
    bits = x.to(tl.uint32, bitcast=True)
    whole = bits & 0x7FFFFFFF
    # To the nearest, ties to even: 20 of 23 bits go, and the exponent's bias is 7 instead of 127.
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 steps are even; beside 2**14 float32 has the same.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    number = tl.where(x != x, 0x7F, tl.where(tl.abs(x) < 0.015625, small, normal))
    return (number | ((bits >> 31) << 7)).to(tl.uint8), scale


@triton.jit
def _quantize(x, rounded, scales, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """One program per row."""
    follow(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    values, scale = round_row(tl.load(x + row * SIZE + column, column < SIZE, 0.0).to(tl.float32))
    tl.store(rounded + row * SIZE + column, values, column < SIZE)
    tl.store(scales + row, scale)


class RoundedRows:
    """What a norm has rounded in passing, until the product behind it takes it."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def make(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the values and scales of rows x that are being made."""
        values, scales = room_for(x)
        self._last = x, values, scales
        return values, scales

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows x rounded: as they come from a norm, or now."""
        last, self._last = self._last, None
        return (last[1].view(FP8), last[2]) if last is not None and last[0] is x else quantize_rows(x)


def room_for(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [n, size] uint8 and scales [n, 1] float32 of rows x [n, size], to be filled."""
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(len(x), 1, dtype=torch.float32)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.fp8.quantize_rows`; x [n, size] contiguous."""
    values, scales = room_for(x)
    if len(x):
        width = triton.next_power_of_2(x.shape[1])
        warps = min(max(width // 512, 1), 16)
        _quantize[(len(x),)](x, values, scales, x.shape[1], width, num_warps=warps, **dependent(x))
    return values.view(FP8), scales
