"""The part of a product that one program computes."""

from __future__ import annotations

import msgspec


class Tiling(msgspec.Struct, frozen=True):
    """The work of a program: `columns` outputs of `rows`, `depth` inputs at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
