"""`ArrayLibrary`: one set of operations on arrays, for the code that runs a step on any device.

    on the host    NumPy arrays: no torch, and a third of the time of each small operation
    on a device    torch tensors, of its memory

Where both spell an operation alike it is written as such: indexing, slices and assignment to them, arithmetic,
comparisons, `len`, `shape`, `any`, `tolist`. The rest is a method here, named and meant as in NumPy.

The code that uses it keeps to operations with the same numbers in both:

- Dtypes are said, not left to defaults: an assignment to a part of an array takes values of its dtype.
- A Python number takes the dtype of the array that it meets (NumPy does so since 2.0).
- Masks multiply (`table *= is_kept`); nothing is picked by a mask, since a device would have to tell how much it is.
- A slice shares memory, an index array copies.

The model takes tensors, so the host's arrays become tensors over the same memory at one place (`tensor`). A kernel that
takes addresses needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import torch

    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
    """An array of the host's NumPy, or of a device's torch."""


def address(array: Array) -> int:
    """Return where the numbers of an array begin in the host's memory, for kernels that take addresses."""
    if isinstance(array, np.ndarray):
        start: int = array.__array_interface__["data"][0]
        return start
    return array.data_ptr()


class ArrayLibrary(Protocol):
    """Operations that NumPy and torch spell differently. Dtypes are named, e.g. `int32`.

    NumPy has no `bfloat16`: the host's arrays of it are their bits, `uint16`, which kernels read and write by address.
    """

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a large array of zeros, whose memory is taken as it is first written where the device can do that."""

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array whose numbers are yet to be written."""

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array:
        """Return an array of one value."""

    def copy(self, array: Array) -> Array:
        """Return an array of the same numbers in memory of its own."""

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return an array of the host: itself there; on a device a copy of it, for which the host does not wait."""

    def arange(self, count: int, dtype: str) -> Array:
        """Return 0, 1 ... count - 1."""

    def astype(self, array: Array, dtype: str) -> Array:
        """Return an array in another dtype; itself if it has it."""

    def at_least(self, array: Array, least: int) -> Array:
        """Return an array with `least` in place of what is smaller."""

    def where(self, condition: Array, then: Array | float, otherwise: Array | float) -> Array:
        """Return `then` where a condition holds, and `otherwise` elsewhere."""

    def add_at(self, array: Array, places: tuple[Array, Array], values: Array) -> None:
        """Add values to places of an array, of which one may occur several times."""

    def counts(self, numbers: Array, is_counted: Array, size: int) -> Array:
        """Return how often the number at each place is counted in its row, [n, L] float32.

        Args:
            numbers: [n, L] int64, 0..size - 1. is_counted: [n, L] bool.
        """

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor over the same memory."""
