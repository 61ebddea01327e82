"""Seeded random numbers in NumPy, for weights that no file has."""

from __future__ import annotations

import numpy as np

from tokenmill.model.quantization.stored_array import StoredArray


def seeded_normal(shape: tuple[int, ...], deviation: float, seed: int) -> StoredArray:
    """Return normally distributed numbers around 0, the same for a seed, in float32."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return StoredArray(values, "F32")
