"""Which group a tile of rows belongs to: of the tokens of requests, or of the rows of experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_group(starts, tile, num_groups, TILE: tl.constexpr):
    """The group of tile `tile`, where group g has tiles from (starts[g] - starts[0]) // TILE + g on.

    That leaves each group enough tiles wherever it starts, so that nobody needs to count them: the host launches
    rows // TILE + groups of them, and those behind the end of their group have nothing to do.
    """
    base = tl.load(starts)
    low = 0
    high = num_groups
    while low < high:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - base) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def first_row(starts, tile, group, TILE: tl.constexpr):
    """Where tile `tile` begins within its group, in rows; may lie behind the group's end."""
    return (tile - (tl.load(starts + group) - tl.load(starts)) // TILE - group) * TILE
