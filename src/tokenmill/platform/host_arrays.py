"""`HostArrays`: the host's `ArrayLibrary`, which is NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.platform.memory import zeroed_bytes


class HostArrays:
    """See `ArrayLibrary`."""

    def zeros(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return an array of zeros that costs nothing until it is written."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return zeroed_bytes(size).view(dtype).reshape(shape) if size else np.zeros(shape, dtype)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> npt.NDArray[Any]:
        """Return an array of one value."""
        return np.full(shape, value, dtype)

    def arange(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """Return 0, 1 ... count - 1."""
        return np.arange(count, dtype=dtype)

    def astype(self, array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """Return an array in another dtype; itself if it has it."""
        return array.astype(dtype, copy=False)

    def at_least(self, array: npt.NDArray[Any], least: int) -> npt.NDArray[Any]:
        """Return an array with `least` in place of what is smaller."""
        return np.maximum(array, least)

    def tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return an array as a tensor over the same memory."""
        return torch.from_numpy(array)
