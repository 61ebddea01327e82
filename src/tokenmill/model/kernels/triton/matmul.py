"""Compute x W^T, whole or in groups of rows with a weight each: for experts, and for batch-invariant results.

Tiles and the order of sums are fixed, whatever the number of rows; libraries choose both by it. Eight-bit floats alone
have other tiles where rows are rounded too, which the caller decides.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.fp8 import FP8
from tokenmill.model.kernels.triton.fp8 import widen
from tokenmill.model.kernels.triton.search import find_group, first_row
from tokenmill.model.kernels.triton.tiling import Tiling

TILING = Tiling(64, 128, 64, 4, 3)
# Of weights in eight-bit floats: where they are widened, and where the rows are rounded to multiply them.
WIDENING, ROUNDED = Tiling(32, 64, 128, 4, 4), Tiling(128, 128, 128, 8, 3)


@triton.jit
def _fp4_numbers(codes, scales):
    """Decode four-bit numbers (e2m1, sign in bit 3), times 2^(scale - 127), exactly; codes and scales are int32."""
    exponent = (codes >> 1) & 3
    mantissa = codes & 1
    bits = tl.where(exponent > 0, (exponent + 126) << 23 | mantissa << 22, mantissa * 0x3F000000)
    magnitude = bits.to(tl.float32, bitcast=True)
    factor = tl.where(scales > 0, scales << 23, 0x400000).to(tl.float32, bitcast=True)
    return tl.where(codes >= 8, -magnitude, magnitude) * factor


@triton.jit(do_not_specialize=["num_groups", "num_rows", "by_row"])
def _multiply(
    x,
    weight,
    factors,
    row_scales,
    bias,
    output,
    sources,
    starts,
    groups,
    num_groups,
    num_rows,
    by_row,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FP4: tl.constexpr,
    IS_FP8: tl.constexpr,
    ARE_ROUNDED: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    tile = tl.program_id(0)
    group = 0
    begin = tile * ROWS_TILE
    end = num_rows
    if GROUPED:
        if by_row != 0:
            # A program for each row has nothing to look for; those whose row begins no tile end here.
            group = tl.load(groups + tile)
            begin = tile
            is_first = (tile - tl.load(starts + group)) % ROWS_TILE == 0
            end = tl.where(is_first, tl.load(starts + group + 1), 0)
        else:
            group = find_group(starts, tile, num_groups, ROWS_TILE)
            begin = tl.load(starts + group) + first_row(starts, tile, group, ROWS_TILE)
            end = tl.load(starts + group + 1)
    if begin < end:
        row = begin + tl.arange(0, ROWS_TILE)
        column = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
        is_row = row < end
        is_column = column < COLUMNS
        source = row.to(tl.int64)
        if HAS_SOURCES:
            source = tl.load(sources + row, is_row, 0)
        # Rows of all matrices lie behind each other.
        line = tl.cast(group, tl.int64) * COLUMNS + column if GROUPED else column.to(tl.int64)
        total = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
        for start in range(0, DEPTH, DEPTH_TILE):
            depth = start + tl.arange(0, DEPTH_TILE)
            is_depth = depth < DEPTH
            a = tl.load(x + source[:, None] * DEPTH + depth[None, :], is_row[:, None] & is_depth[None, :], 0.0)
            wanted = is_column[:, None] & is_depth[None, :]
            if IS_FP4:
                pairs = tl.load(weight + line[:, None] * (DEPTH // 2) + depth[None, :] // 2, wanted, 0).to(tl.int32)
                scales = tl.load(factors + line[:, None] * (DEPTH // 32) + depth[None, :] // 32, wanted, 0)
                b = _fp4_numbers(pairs >> (depth % 2 * 4)[None, :] & 15, scales.to(tl.int32)).to(a.dtype)
            else:
                b = tl.load(weight + line[:, None] * DEPTH + depth[None, :], wanted, 0.0)
            if IS_FP8 and not ARE_ROUNDED:
                b = widen(b, a.dtype, BY_BITS)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if IS_FP8:
            total *= tl.load(factors + line, is_column, 0.0)[None, :]
        if ARE_ROUNDED:
            total *= tl.load(row_scales + source, is_row, 0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + line, is_column, 0.0).to(tl.float32)[None, :]
        target = output + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(target, total.to(output.dtype.element_ty), is_row[:, None] & is_column[None, :])


class Groups(msgspec.Struct, frozen=True):
    """The rows of a product, those of a group behind each other; tensors on the device.

    Attributes:
        starts: [E + 1] int32, where the rows of each group begin; the last is P.
        of_rows: [P] int32, the group of each row.
        sources: [P] int64, the row of x for each row of the result; None: its own.
    """

    starts: torch.Tensor
    of_rows: torch.Tensor
    sources: torch.Tensor | None = None


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, in_size] W^T + bias -> [T, out_size]; a row's result depends on that row alone."""
    output = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, bias, output, triton.cdiv(x.shape[0], TILING.rows))
    return output


def grouped_multiply(
    x: torch.Tensor,
    weights: torch.Tensor,
    groups: Groups,
    factors: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    rounded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Multiply rows of x by the weight of their group.

    Where there are fewer rows than there may be tiles, a program for each row takes the tile that its row begins:
    a token with 8 of 128 experts and 1,536 columns starts 96 programs, all with work, instead of 1,548.

    Estimate, not measured: decodes read each expert that they use once, 2 bytes a number, in mxfp4 17 / 32 of a byte.
    For gpt-oss-20b with 32 requests that is nearly all experts, 10 GB of mxfp4 a step, 2.4 ms at 4.3 TB/s. Decoding the
    numbers takes 12 instructions each for every 64 rows, 8 ms on 132 multiprocessors: the bottleneck of such a step.

    Eight-bit floats, an estimate too, for a layer of Qwen3-30B-A3B (128 experts of 3 x 2,048 x 768, 8 for a token) at
    3.0 TB/s: 38 MB, 13 us, with one token; 0.61 GB, 202 us, where all experts are used, and half of bfloat16's in both.
    Widening takes 9 instructions for 4 numbers, 46 us of all schedulers where each expert has up to 32 rows, behind the
    reading. Products take 9.4 million operations a row of an expert: beside its bytes nothing up to some 65 rows at
    half of the rate of a large product, which is what widened weights in registers are taken to reach.

    Args:
        x: [N, in_size] contiguous.
        weights: [E, out_size, in_size] contiguous in x's type or e4m3; in mxfp4 [E, out_size, in_size / 2] uint8, see
            `Mxfp4Rows`.
        factors: of mxfp4 its exponents, [E, out_size, in_size / 32] uint8; of e4m3 the scale of each output, [E,
            out_size, 1] float32; None: weights are in x's type.
        biases: [E, out_size], added before the result is rounded.
        rounded: x as `quantize_rows` of `kernels.fp8` gives it, to multiply weights in e4m3 without widening them.

    Returns:
        [P, out_size] in x's type.
    """
    num_rows = len(groups.of_rows)
    output = x.new_empty(num_rows, weights.shape[1])
    tiling = TILING if weights.dtype != FP8 else WIDENING if rounded is None else ROUNDED
    tiles = min(num_rows, num_rows // tiling.rows + weights.shape[0])
    _launch(x, weights, biases, output, tiles, tiling, groups, factors, rounded)
    return output


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    tiles: int,
    tiling: Tiling = TILING,
    groups: Groups | None = None,
    factors: torch.Tensor | None = None,
    rounded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    columns, depth = weight.shape[-2], x.shape[-1]
    if not len(output):
        return
    rows, row_scales = (x, None) if rounded is None else rounded
    starts, of_rows, sources = (None, None, None) if groups is None else (groups.starts, groups.of_rows, groups.sources)
    is_fp8 = weight.dtype == FP8
    _multiply[(tiles, triton.cdiv(columns, tiling.columns))](
        *(rows, weight, factors, row_scales, bias, output),
        *(sources, starts, of_rows),
        0 if starts is None else len(starts) - 1,
        len(output),
        int(tiles == len(output)),
        COLUMNS=columns,
        DEPTH=depth,
        ROWS_TILE=tiling.rows,
        COLUMNS_TILE=tiling.columns,
        DEPTH_TILE=tiling.depth,
        GROUPED=groups is not None,
        HAS_SOURCES=sources is not None,
        HAS_BIAS=bias is not None,
        IS_FP4=factors is not None and not is_fp8,
        IS_FP8=is_fp8,
        ARE_ROUNDED=rounded is not None,
        BY_BITS=x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
