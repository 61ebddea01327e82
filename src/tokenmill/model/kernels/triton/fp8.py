"""Eight-bit floats in kernels: widen weights of them, and quantize rows of activations, with a scale each.

Rows are quantized as `quantize_rows` of `kernels.fp8` does, in one launch, or in none where a norm precedes the
product.

Estimate, not measured, of that launch: 3 bytes and 25 instructions a number; 256 rows of 3,072 are 2.4 MB, half a
microsecond on an H200, less than a launch costs; torch's seven kernels move some 30 bytes a number and cost seven
launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.fp8 import FP8
from tokenmill.model.kernels.triton.launch import dependent, follow


@triton.jit
def widen(numbers, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """Return e4m3 as `dtype`, which has every value of it: bfloat16 with shifts, which outrun a GPU's conversions.

    A byte's exponent and mantissa, moved to bfloat16's places, are 2**-120 of the number, subnormals too.
    """
    if BY_BITS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, sign, by, zero;
            mov.b32 by, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, zero;
            shr.u32 low, low, 4;
            lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
            and.b32 sign, high, zero;
            shr.u32 high, high, 4;
            lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
            fma.rn.bf16x2 $0, low, by, zero;
            fma.rn.bf16x2 $1, high, by, zero;
            }""",
            "=r,=r,r",
            [numbers.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return numbers.to(dtype)


@triton.jit
def round_row(x):
    """Round a row [WIDTH] float32 to e4m3, in uint8, and return it with its scale.

    It works on float32's bits, so it is exact on every GPU and in the interpreter.
    """
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
    """Quantize one row per program."""
    follow(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    values, scale = round_row(tl.load(x + row * SIZE + column, column < SIZE, 0.0).to(tl.float32))
    tl.store(rounded + row * SIZE + column, values, column < SIZE)
    tl.store(scales + row, scale)


class RoundedRows:
    """The rows that a norm has rounded along the way, kept until the next product takes them."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def make(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for the values and scales of rows x that a norm is computing."""
        values, scales = room_for(x)
        self._last = x, values, scales
        return values, scales

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows x rounded: by the norm that made them, or now."""
        last, self._last = self._last, None
        return (last[1].view(FP8), last[2]) if last is not None and last[0] is x else quantize_rows(x)


def room_for(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for values [n, size] uint8 and scales [n, 1] float32 of rows x [n, size]."""
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(len(x), 1, dtype=torch.float32)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `kernels.fp8.quantize_rows` in one launch; x [n, size] contiguous."""
    values, scales = room_for(x)
    if len(x):
        width = triton.next_power_of_2(x.shape[1])
        warps = min(max(width // 512, 1), 16)
        _quantize[(len(x),)](x, values, scales, x.shape[1], width, num_warps=warps, **dependent(x))
    return values.view(FP8), scales
