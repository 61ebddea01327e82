"""The blocks of llama.cpp's quantized types (ggml-common.h): codes, scales and offsets; code * scale + offset.

In a byte of two codes the low one belongs to the first half of a run, unless said otherwise. A scale of two levels is
multiplied out in float32, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Parts = tuple[int, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]
"""bits, codes [blocks, n], scales [blocks, groups], offsets [blocks, groups] or None."""

# The numbers of four bits of IQ4_NL and IQ4_XS by code.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def half(data: Bytes) -> npt.NDArray[np.float32]:
    """Read [blocks, 2 * n] bytes of float16 as [blocks, n]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Read [blocks, n] bytes as [blocks, 2 * n] codes, in the low halves first."""
    return np.concatenate((packed & 15, packed >> 4), 1)


def _bits(data: Bytes, size: int, run: int) -> npt.NDArray[np.uint8]:
    """Read runs of bytes of codes of `size` bits, the lowest bits first: [blocks, runs, code, run]."""
    shifts = np.arange(8 // size, dtype=np.uint8) * np.uint8(size)
    codes = data.reshape(len(data), -1, 1, run) >> shifts.reshape(1, 1, -1, 1)
    return codes & np.uint8((1 << size) - 1)


def _fifths(data: Bytes) -> Bytes:
    """Read four bytes of fifth bits, bit j for code j, as [blocks, 32] of 0 or 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(units: Bytes) -> Parts:
    """Read a scale, 16 bytes; 8 is zero."""
    scales = half(units[:, :2])
    return 4, nibbles(units[:, 2:]), scales, -8 * scales


def _q4_1(units: Bytes) -> Parts:
    """Read a scale, an offset, 16 bytes."""
    return 4, nibbles(units[:, 4:]), half(units[:, :2]), half(units[:, 2:4])


def _q5_0(units: Bytes) -> Parts:
    """Read a scale, the fifth bits, 16 bytes; 16 is zero."""
    scales = half(units[:, :2])
    return 5, nibbles(units[:, 6:]) | _fifths(units[:, 2:6]), scales, -16 * scales


def _q5_1(units: Bytes) -> Parts:
    """Read a scale, an offset, the fifth bits, 16 bytes."""
    return 5, nibbles(units[:, 8:]) | _fifths(units[:, 4:8]), half(units[:, :2]), half(units[:, 2:4])


def _q8_0(units: Bytes) -> Parts:
    """Read a scale, 32 int8."""
    return 8, np.ascontiguousarray(units[:, 2:]).view(np.int8), half(units[:, :2]), None


def _q2_k(units: Bytes) -> Parts:
    """Read 16 bytes of a scale and a minimum of four bits each, 64 bytes of codes, two scales of these."""
    scale, minimum = half(units[:, 80:82]), half(units[:, 82:84])
    codes = _bits(units[:, 16:80], 2, 32).reshape(-1, 256)
    return 8, codes.astype(np.int8), scale * (units[:, :16] & 15), -minimum * (units[:, :16] >> 4)


def _q3_k(units: Bytes) -> Parts:
    """Read 32 bytes of high bits, 64 of low pairs, 12 of 6-bit scales, a scale of these."""
    high = _bits(units[:, :32], 1, 32).reshape(-1, 256)
    low = _bits(units[:, 32:96], 2, 32).reshape(-1, 256)
    packed = units[:, 96:108]
    scales = nibbles(packed[:, :8]) | _bits(packed[:, 8:], 2, 4).reshape(-1, 16) << np.uint8(4)
    codes = (low | high << np.uint8(2)).astype(np.int8) - np.int8(4)
    return 8, codes, half(units[:, 108:]) * (scales.astype(np.int8) - np.int8(32)), None


def _k_scales(units: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Read two scales, and 12 bytes of 8 scales and 8 minima of six bits: the groups' scales and offsets."""
    scale, minimum, packed = half(units[:, :2]), half(units[:, 2:4]), units[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), 1)
    return scale * scales, -minimum * minima


def _q4_k(units: Bytes) -> Parts:
    """Read scales of 8 groups, 128 bytes; a run of 32 bytes holds two groups."""
    return 4, _bits(units[:, 16:], 4, 32).reshape(-1, 256), *_k_scales(units)


def _q5_k(units: Bytes) -> Parts:
    """Read scales of 8 groups, 32 bytes of fifth bits, 128 bytes; a run of 32 bytes holds two groups."""
    fifths = _bits(units[:, 16:48], 1, 32).reshape(-1, 256)
    codes = _bits(units[:, 48:], 4, 32).reshape(-1, 256) | fifths << np.uint8(4)
    return 8, codes.astype(np.int8), *_k_scales(units)


def _q6_k(units: Bytes) -> Parts:
    """Read 128 bytes of low nibbles, 64 of high bits, 16 int8 scales, a scale of these; 32 is zero."""
    low, high = units[:, :128].reshape(-1, 2, 2, 32), units[:, 128:192]
    codes = np.concatenate((low & 15, low >> 4), 2) | _bits(high, 2, 32) << np.uint8(4)
    scales = np.ascontiguousarray(units[:, 192:208]).view(np.int8) * half(units[:, 208:])
    return 8, codes.reshape(-1, 256).astype(np.int8) - np.int8(32), scales, None


def _iq4_nl(units: Bytes) -> Parts:
    """Read a scale, 16 bytes of codes of `IQ4`."""
    return 8, IQ4[nibbles(units[:, 2:])], half(units[:, :2]), None


def _iq4_xs(units: Bytes) -> Parts:
    """Read a scale, 8 group scales in high pairs and low nibbles, 128 bytes of codes of `IQ4` in runs of 16."""
    high = _bits(units[:, 2:4], 2, 1).reshape(-1, 8)
    low = _bits(units[:, 4:8], 4, 1).reshape(-1, 8)
    scales = half(units[:, :2]) * ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32))
    return 8, IQ4[_bits(units[:, 8:], 4, 16).reshape(-1, 256)], scales, None


def _tq1_0(units: Bytes) -> Parts:
    """Read 32, 16 and 4 bytes of five (four) codes of three values each, a scale; the first is the highest digit."""
    runs = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**power for power in range(count)], np.uint8)
        digits = units[:, begin:end].reshape(len(units), 1, -1) * powers.reshape(1, -1, 1)
        runs.append(((digits.astype(np.uint16) * 3) >> 8).reshape(len(units), -1))
    return 8, np.concatenate(runs, 1).astype(np.int8) - np.int8(1), half(units[:, 52:]), None


def _tq2_0(units: Bytes) -> Parts:
    """Read 64 bytes of codes of two bits, a scale; 1 is zero."""
    return 8, _bits(units[:, :64], 2, 32).reshape(-1, 256).astype(np.int8) - np.int8(1), half(units[:, 64:]), None


LAYOUTS: Mapping[str, tuple[int, Callable[[Bytes], Parts]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q2_K": (84, _q2_k),
        "Q3_K": (110, _q3_k),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
        "IQ4_NL": (18, _iq4_nl),
        "IQ4_XS": (136, _iq4_xs),
        "TQ1_0": (54, _tq1_0),
        "TQ2_0": (66, _tq2_0),
    }
)
"""Type -> bytes of a block, and how its bytes [blocks, bytes] are read."""
