"""Round a number to a type of floats, in NumPy, which has no bfloat16."""

from __future__ import annotations

import numpy as np


def rounded(value: float, dtype: str) -> float:
    """Return the number of a type, e.g. `bfloat16`, that is nearest to a finite one's float32."""
    if dtype != "bfloat16":
        return float(np.dtype(dtype).type(np.float32(value)))
    bits = int(np.float32(value).view(np.uint32))
    kept = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return float(np.uint32(kept).view(np.float32))
