"""CRC-32C (Castagnoli), which tells whether a page is unchanged: the native one, and a slow reference beside it.

Where the kernels were not built, zlib's CRC-32 does its work; files say which one they were written with.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable

import numpy as np

from tokenmill.model.kernels.native import MODULE

Checksum = Callable[[memoryview], int]


def find_checksum() -> tuple[str, Checksum]:
    """Return the name of the checksum that this build has, and the function that computes it."""
    try:
        native = importlib.import_module(MODULE)
    except ImportError:
        return "crc32", zlib.crc32
    function = native.crc32c

    def crc32c(data: memoryview) -> int:
        array = np.frombuffer(data, dtype=np.uint8)
        value: int = function(array.ctypes.data, array.nbytes, 0)
        return value

    return "crc32c", crc32c


def reference_crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit: the remainder of the data by the polynomial 0x1EDC6F41, bits reflected."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF
