"""cos and sin of the angles of the rotary position embedding, the same bits on every machine.

They are computed in float64, by additions and products alone (range reduction after Cody and Waite, then the Taylor
series), and rounded to float32 once. The native kernel does the same operations in the same order: libraries differ in
the last bit, from version to version and from processor to processor. Knows no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenmill import _native

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Positions from here on have no cos and sin of their own: float32 does not tell them apart.
MOST_POSITIONS = 1 << 24
# Numbers at a time: what stays in a cache.
_PART = 1 << 15
# Added to a number below 2^51, it leaves its nearest integer in the low bits of the sum.
_TO_INTEGER = 1.5 * 2.0**52
# pi / 2 in three parts: the products of the first two with whole numbers up to 2^24 are exact.
_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb54p+0", "0x1.10b461p-30", "0x1.a62633145c06ep-58")))
_COEFFICIENTS = tuple(1 / math.factorial(n) for n in range(18))


def cos_and_sin(frequencies: Floats, positions: int, native: _native.Kernels | None = None) -> tuple[Floats, Floats]:
    """Return cos and sin of position * frequency, itself rounded to float32: two arrays [positions, size].

    Args:
        frequencies: [size], in radians per position; at least 0, and no angle may reach 2^24.
        positions: how many, from 0 on.
        native: kernels that do it, with the same bits; None: numpy does, more slowly.

    Raises:
        ValueError: more positions than float32 tells apart.
    """
    if positions > MOST_POSITIONS:
        raise ValueError(f"{positions} positions: rotary tables have at most {MOST_POSITIONS}")
    frequencies = np.ascontiguousarray(frequencies, dtype=np.float32)
    cos, sin = (np.empty((positions, len(frequencies)), dtype=np.float32) for _ in range(2))
    if native is not None:
        tables = cos.ctypes.data, sin.ctypes.data
        native.rotary_tables(frequencies.ctypes.data, positions, len(frequencies), *tables)
        return cos, sin
    rows = max(1, _PART // max(1, len(frequencies)))
    for start in range(0, positions, rows):
        places = np.arange(start, min(start + rows, positions), dtype=np.float32)
        cos[start : start + rows], sin[start : start + rows] = _cos_and_sin(np.multiply.outer(places, frequencies))
    return cos, sin


def _cos_and_sin(angles: Floats) -> tuple[Doubles, Doubles]:
    x = angles.astype(np.float64)
    shifted = x * (2 / math.pi) + _TO_INTEGER
    quarters, n = shifted.view(np.int64), shifted - _TO_INTEGER
    first, second, third = _HALF_PI
    r = ((x - n * first) - n * second) - n * third
    square = r * r
    cos, sin = _series(square, 0), _series(square, 1) * r
    # Quarter turns swap the two, and half turns change their signs.
    swaps = (quarters & 1).astype(np.bool_)
    cos, sin = np.where(swaps, sin, cos), np.where(swaps, cos, sin)
    np.negative(cos, out=cos, where=((quarters + 1) & 2).astype(np.bool_))
    np.negative(sin, out=sin, where=(quarters & 2).astype(np.bool_))
    return cos, sin


def _series(square: Doubles, first: int) -> Doubles:
    """Return the sum of every second term of the Taylor series from `first` on, with changing signs."""
    total = np.full_like(square, _COEFFICIENTS[16 + first])
    for n in range(14 + first, -1, -2):
        total = _COEFFICIENTS[n] - total * square
    return total
