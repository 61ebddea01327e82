"""Numbers as a file stores them, in NumPy, which has no bfloat16: an array of these is one of uint16, and says so.

Knows no torch; kernels that compute in torch take them as tensors, see model/kernels/stored_tensors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

TYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F16": np.float16,
        "BF16": np.uint16,
        "I16": np.int16,
        "F32": np.float32,
        "I32": np.int32,
        "F64": np.float64,
        "I64": np.int64,
    }
)
"""NumPy's type for each name of safetensors."""
NOT_A_NUMBER = 0x7FC0
"""Bits of a NaN in bfloat16."""


class StoredArray(msgspec.Struct, frozen=True):
    """An array of numbers, and which numbers they are.

    Attributes:
        values: of the type that `TYPES` has for them; of bfloat16 the bits.
        dtype: their type by safetensors' name, e.g. `BF16`.
    """

    values: npt.NDArray[Any]
    dtype: str

    @classmethod
    def of_bytes(cls, data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> StoredArray:
        """Return bytes [n] as the numbers that they are, without a copy if their address fits the type."""
        values = data.view(TYPES[dtype]).reshape(shape)
        return cls(values if values.flags.aligned else values.copy(), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> StoredArray:
        return StoredArray(self.values[index], self.dtype)

    def is_finite(self) -> bool:
        """Return True if no float is infinite or not a number."""
        if self.dtype == "BF16":
            return not bool((self.values & np.uint16(0x7F80) == 0x7F80).any())
        return bool(np.isfinite(self.values).all())

    def float32(self) -> npt.NDArray[np.float32]:
        """Return the numbers in float32; those of float32 are not copied."""
        if self.dtype != "BF16":
            return self.values.astype(np.float32, copy=False)
        wide = self.values.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)

    def bfloat16(self) -> npt.NDArray[np.uint16]:
        """Return the bits of the numbers in bfloat16, rounded to even; those of bfloat16 are not copied."""
        if self.dtype == "BF16":
            return self.values
        wide = self.values.astype(np.float32, order="C")  # a copy, for what follows changes it
        bits, is_number = wide.view(np.uint32), ~np.isnan(wide)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits >>= np.uint32(16)
        return np.where(is_number, bits, np.uint32(NOT_A_NUMBER)).astype(np.uint16)


def seeded_normal(shape: tuple[int, ...], deviation: float, seed: int) -> StoredArray:
    """Return normally distributed numbers around 0, the same for a seed, in float32: weights that no file has."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return StoredArray(values, "F32")
