"""x W^T, whole or in groups of rows with a weight each: what experts need, and what does not depend on the batch.

Tiles and the order of sums are fixed, whatever the number of rows; libraries choose both by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.search import find_group, first_row

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 128, 64


@triton.jit(do_not_specialize=["num_groups", "num_rows"])
def _multiply(
    x,
    weight,
    bias,
    output,
    sources,
    starts,
    num_groups,
    num_rows,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    tile = tl.program_id(0)
    group = 0
    begin = tile * ROWS_TILE
    end = num_rows
    if GROUPED:
        group = find_group(starts, tile, num_groups, ROWS_TILE)
        begin = tl.load(starts + group) + first_row(starts, tile, group, ROWS_TILE)
        end = tl.load(starts + group + 1)
    if begin < end:
        row = begin + tl.arange(0, ROWS_TILE)
        column = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
        is_row = row < end
        is_column = column < COLUMNS
        source = row.to(tl.int64)
        if GROUPED:
            source = tl.load(sources + row, is_row, 0)
        matrix = weight + tl.cast(group, tl.int64) * COLUMNS * DEPTH if GROUPED else weight
        total = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
        for start in range(0, DEPTH, DEPTH_TILE):
            depth = start + tl.arange(0, DEPTH_TILE)
            is_depth = depth < DEPTH
            a = tl.load(x + source[:, None] * DEPTH + depth[None, :], is_row[:, None] & is_depth[None, :], 0.0)
            b = tl.load(
                matrix + column[:, None].to(tl.int64) * DEPTH + depth[None, :],
                is_column[:, None] & is_depth[None, :],
                0.0,
            )
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
        target = output + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(target, total.to(output.dtype.element_ty), is_row[:, None] & is_column[None, :])


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in_size] W^T + bias -> [T, out_size]; a row's result depends on that row alone."""
    output = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, weight, bias, output, None, triton.cdiv(x.shape[0], TILE_ROWS))
    return output


def grouped_multiply(
    x: torch.Tensor, weights: torch.Tensor, sources: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Rows of x times the weight of their group.

    Args:
        x: [N, in_size] contiguous.
        weights: [E, out_size, in_size] contiguous.
        sources: [P] int64, the row of x of each row of the result; the rows of a group lie together, in order.
        starts: [E + 1] int32, where the rows of each group begin; the last is P.

    Returns:
        [P, out_size].
    """
    output = x.new_empty(len(sources), weights.shape[1])
    _launch(x, weights, None, output, (sources, starts), len(sources) // TILE_ROWS + weights.shape[0])
    return output


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor] | None,
    tiles: int,
) -> None:
    columns, depth = weight.shape[-2:]
    if not len(output):
        return
    sources, starts = groups or (None, None)
    _multiply[(tiles, triton.cdiv(columns, TILE_COLUMNS))](
        x,
        weight,
        bias,
        output,
        sources,
        starts,
        0 if starts is None else len(starts) - 1,
        len(output),
        COLUMNS=columns,
        DEPTH=depth,
        ROWS_TILE=TILE_ROWS,
        COLUMNS_TILE=TILE_COLUMNS,
        DEPTH_TILE=TILE_DEPTH,
        GROUPED=groups is not None,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
    )
