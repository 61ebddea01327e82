"""`HostArrays`: the host's `ArrayLibrary`, which is NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.platform.memory import shared_bytes, zeroed_bytes

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray, Array, ArrayLibrary


class HostArrays:
    """See `ArrayLibrary`."""

    def zeros(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return an array of zeros that costs nothing until it is written."""
        dtype = "uint16" if dtype == "bfloat16" else dtype
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return zeroed_bytes(size).view(dtype).reshape(shape) if size else np.zeros(shape, dtype)

    def empty(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return an array whose numbers are yet to be written."""
        return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> npt.NDArray[Any]:
        """Return an array of one value."""
        return np.full(shape, value, dtype)

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array of the same numbers in memory of its own."""
        return array.copy()

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array as it is."""
        return array

    def arange(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """Return 0, 1 ... count - 1."""
        return np.arange(count, dtype=dtype)

    def astype(self, array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """Return an array in another dtype; itself if it has it."""
        return array.astype(dtype, copy=False)

    def at_least(self, array: npt.NDArray[Any], least: int) -> npt.NDArray[Any]:
        """Return an array with `least` in place of what is smaller."""
        return np.maximum(array, least)

    def where(self, condition: npt.NDArray[Any], then: Any, otherwise: Any) -> npt.NDArray[Any]:
        """Return `then` where a condition holds, and `otherwise` elsewhere."""
        return np.where(condition, then, otherwise)

    def add_at(self, array: npt.NDArray[Any], places: tuple[Any, Any], values: npt.NDArray[Any]) -> None:
        """Add values to places of an array, of which one may occur several times."""
        np.add.at(array, places, values)

    def counts(self, numbers: npt.NDArray[Any], is_counted: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
        """Return how often the number at each place is counted in its row, [n, L] float32."""
        found = np.empty(numbers.shape, dtype=np.float32)
        # Row by row: the counts of one stay in the cache.
        for own, row, is_own in zip(found, numbers, is_counted, strict=True):
            own[:] = np.bincount(row[is_own], minlength=size)[row]
        return found

    def over(self, memory: npt.NDArray[np.uint8], like: AnyArray) -> AnyArray:
        """Return bytes as numbers of the dtype of another array, in a row."""
        return memory.view(like.dtype)


class SharedArrays(HostArrays):
    """The host's arrays in memory that other processes can map.

    Attributes:
        descriptors: of the files without names that hold the zeros it has made, in their order; never closed.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def zeros(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """Return an array of zeros in a file of its own."""
        dtype = "uint16" if dtype == "bfloat16" else dtype
        memory, descriptor = shared_bytes(math.prod(shape) * np.dtype(dtype).itemsize)
        self.descriptors.append(descriptor)
        return memory.view(dtype).reshape(shape)


_HOST = HostArrays()


def library_of(array: Array) -> ArrayLibrary:
    """Return the library that an array is of."""
    if isinstance(array, np.ndarray):
        return _HOST
    from tokenmill.platform.device_arrays import DeviceArrays

    return DeviceArrays(array.device)


def host_array(array: Array) -> npt.NDArray[Any]:
    """Return an array, or a tensor of the host, as an array over the same memory; bfloat16 as its bits."""
    if isinstance(array, np.ndarray):
        return array
    from tokenmill.platform.tensor_memory import array_of

    return array_of(array)
