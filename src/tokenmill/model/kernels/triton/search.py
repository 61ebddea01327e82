"""Find the group of a tile of rows: the request of its tokens, or the expert of its rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_group(starts, tile, num_groups, TILE: tl.constexpr):
    """Find the group of tile `tile`, where group g has tiles from (starts[g] - starts[0]) // TILE + g on.

    That leaves each group enough tiles wherever it starts, without counting them: the host launches rows // TILE +
    groups tiles, and those past the end of their group have nothing to do.
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
    """Return the first row of tile `tile` within its group; it may be past the group's end."""
    return (tile - (tl.load(starts + group) - tl.load(starts)) // TILE - group) * TILE
