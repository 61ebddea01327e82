"""Compute x W^T for the few rows of a decode, with the gate of a fused projection in the same pass.

W is in x's dtype, or in eight-bit floats with a scale per output: x is not rounded then, as it is for many rows.

A step of few requests does nothing but read weights. Each program reads some rows of W from end to end, and may ask for
them before the kernel in front has ended: they do not depend on it, and x is all that this kernel waits for.

Measured on an H100 (26 November 2026, microseconds a product in a graph of 28, of which reading W takes 2.8, 1.4, 4.2
and 2.1): qkv, output, gate and up, down of Qwen3-0.6B by one row 5.0, 4.5, 6.1 and 6.4, by the library 5.3, 5.7, 8.7
(with the gate's kernel) and 7.6; by 64 rows 6.3, 5.2, 6.9 and 7.6, by the library 6.0, 5.9, 9.4 and 8.1. The library is
faster with 256 rows, and with matrices that take so long to read that a launch does not matter.

Eight-bit floats by one row, those of Qwen3-14B: 16.4, 15.3, 70 and 44, the library with x rounded 24, 21, 87 and 64 (6
of them rounding, which a norm in front saves), bfloat16 31, 21, 134 and 68. The result is 2.6% from float32's, with x
rounded 3.7%. By 64 rows the library is faster, unless the matrix is small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.protocol import Gate
from tokenmill.model.kernels.triton.fp8 import widen
from tokenmill.model.kernels.triton.gate import apply_gate
from tokenmill.model.kernels.triton.launch import dependent, follow, is_on_gpu
from tokenmill.model.kernels.triton.tiling import Tiling

# A line of the L2 cache in bytes, and how many of a row are asked for at once.
LINE = tl.constexpr(128)
LINES = tl.constexpr(8)
# The most rows that count as few, of which so many are the fewest that tensor cores take.
FEWEST_ROWS, MOST_ROWS = 16, 64
# The largest matrix for which this beats the library, and its most outputs where there are more rows and no gate.
MOST_BYTES, MOST_OUTPUTS = 16 << 20, 2048


class FewRowsTiling(Tiling, frozen=True):
    """The work of a program, which with a gate has pairs of columns; `prefetches`: it asks for all of W ahead."""

    prefetches: bool = True


@triton.jit
def _prefetch(lines, DEPTH):
    """Bring rows of `DEPTH` numbers, which begin at `lines`, into the L2 cache."""
    STEP: tl.constexpr = LINE // (lines.dtype.element_ty.primitive_bitwidth // 8)
    for start in range(0, DEPTH, STEP * LINES):
        ahead = tl.minimum(start + tl.arange(0, LINES) * STEP, DEPTH - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines[:, None] + ahead[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    weight,
    scales,
    bias,
    output,
    num_rows,
    SIZE,
    DEPTH,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCHES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `ROWS` rows by `COLUMNS` rows of W, and with a gate by as many `SIZE` rows behind them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    line = weight + tl.minimum(column, SIZE - 1).to(tl.int64) * DEPTH
    # A size of 1 is a Python number here.
    other = line + tl.cast(SIZE, tl.int64) * DEPTH
    if PREFETCHES:
        _prefetch(line, DEPTH)
        if GATE >= 0:
            _prefetch(other, DEPTH)
    follow(PDL)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, TILE):
        depth = start + tl.arange(0, TILE)
        is_depth = depth < DEPTH
        a = tl.load(x + row[:, None] * DEPTH + depth[None, :], is_row[:, None] & is_depth[None, :], 0.0)
        b = tl.load(line[:, None] + depth[None, :], is_depth[None, :], 0.0)
        if HAS_SCALES:
            b = widen(b, a.dtype, BY_BITS)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if GATE >= 0:
            b = tl.load(other[:, None] + depth[None, :], is_depth[None, :], 0.0)
            if HAS_SCALES:
                b = widen(b, a.dtype, BY_BITS)
            second = tl.dot(a, tl.trans(b), second, input_precision="ieee")
    dtype = output.dtype.element_ty
    if HAS_SCALES:
        total *= tl.load(scales + column, is_column, 0.0)[None, :]
        if GATE >= 0:
            second *= tl.load(scales + SIZE + column, is_column, 0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
        if GATE >= 0:
            second += tl.load(bias + SIZE + column, is_column, 0.0).to(tl.float32)[None, :]
    result = total.to(dtype)
    if GATE >= 0:
        result = apply_gate(result, second.to(dtype), GATE)
    tl.store(output + row[:, None] * SIZE + column[None, :], result, is_row[:, None] & is_column[None, :])


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: Gate | None = None,
    scales: torch.Tensor | None = None,
    tiling: FewRowsTiling | None = None,
) -> torch.Tensor:
    """Return x [T, in_size] W^T + bias for few rows T; with a gate gate(first half) * second half of it.

    Args:
        x, weight: contiguous, of two bytes a number on a GPU.
        scales: [out_size] or [out_size, 1] float32, of a weight in e4m3; None: it is in x's dtype.
        tiling: None: one that suits the shape.
    """
    size, depth = weight.shape[0] // (1 if gate is None else 2), weight.shape[1]
    output = x.new_empty(x.shape[0], size)
    if not len(x):
        return output
    own = tiling or tiling_for(size, len(x), gate is not None, scales is not None)
    _few_rows[(triton.cdiv(size, own.columns), triton.cdiv(len(x), own.rows))](
        *(x, weight, scales, bias, output, len(x), size, depth),
        *(own.rows, own.columns, own.depth, -1 if gate is None else int(gate), scales is not None, bias is not None),
        own.prefetches and x.is_cuda,
        x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=own.warps,
        num_stages=own.stages,
        **dependent(x),
    )
    return output


def suits(x: torch.Tensor, weight: torch.Tensor, has_gate: bool) -> bool:
    """Return whether `few_rows` is faster than the library: on a GPU, in half precision, where little is read."""
    if not is_on_gpu(x) or x.element_size() != 2 or len(x) > MOST_ROWS:
        return False
    is_small, is_fewest = weight.nbytes <= MOST_BYTES, are_fewest(x)
    if weight.element_size() == 1:
        return is_small or is_fewest
    return is_small and (has_gate or is_fewest or len(weight) <= MOST_OUTPUTS)


def are_fewest(x: torch.Tensor) -> bool:
    """Return whether `few_rows` takes rows x whatever a weight of eight-bit floats is: they need not be rounded."""
    return is_on_gpu(x) and x.element_size() == 2 and len(x) <= FEWEST_ROWS


def tiling_for(size: int, num_rows: int, has_gate: bool, is_fp8: bool = False) -> FewRowsTiling:
    """Choose the tiling for a product with `size` outputs: the fastest of some dozens on an H100."""
    is_narrow = size <= MOST_OUTPUTS and not has_gate
    if is_fp8:
        return _fp8_tiling(num_rows, is_narrow, has_gate)
    if num_rows > FEWEST_ROWS and is_narrow:
        return FewRowsTiling(2 * FEWEST_ROWS, 16, 256, 4, 4, prefetches=False)
    if num_rows > FEWEST_ROWS:
        return FewRowsTiling(MOST_ROWS, 32, 128, 4, 4)
    # Few programs have more of W to ask for ahead; many only get into each other's way.
    return FewRowsTiling(FEWEST_ROWS, 32, 256 if is_narrow else 128, 4, 4, prefetches=is_narrow)


def _fp8_tiling(num_rows: int, is_narrow: bool, has_gate: bool) -> FewRowsTiling:
    rows = FEWEST_ROWS if num_rows <= FEWEST_ROWS else 2 * FEWEST_ROWS
    if is_narrow:
        return FewRowsTiling(rows, 16, 256, 2, 4) if rows == FEWEST_ROWS else FewRowsTiling(rows, 16, 128, 4, 4)
    if rows == FEWEST_ROWS:
        return FewRowsTiling(rows, 32, 128 if has_gate else 256, 4, 4, prefetches=False)
    return FewRowsTiling(rows, 64, 128, 4, 4, prefetches=False)
