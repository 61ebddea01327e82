"""Arrays that native kernels read and write, NumPy's or torch's: asked for their form, and made like one another.

NumPy has no bfloat16: its arrays of uint16 are the bits. Imports no torch, whose tensors are asked by their methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.model.quantization.stored_array import StoredArray

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


def is_a(dtype: str, *arrays: Array) -> bool:
    """Return True if all arrays are of a dtype, by its name."""
    host = np.dtype(host_dtype(dtype))
    return all(
        array.dtype == host if isinstance(array, np.ndarray) else str(array.dtype) == f"torch.{dtype}"
        for array in arrays
    )


def host_dtype(dtype: str) -> str:
    """Return the name of NumPy's dtype that holds numbers of a dtype."""
    return "uint16" if dtype == "bfloat16" else dtype


def stride(array: Array, axis: int = 0) -> int:
    """Return how many numbers lie between an element and the next one along an axis."""
    if isinstance(array, np.ndarray):
        return array.strides[axis] // array.itemsize
    found: int = array.stride(axis)
    return found


def in_pieces(*arrays: Array) -> bool:
    """Return True if the rows of all arrays are each in one piece."""
    return all(array.shape[-1] == 1 or stride(array, -1) == 1 for array in arrays)


def in_one_piece(*arrays: Array) -> bool:
    """Return True if each array is contiguous."""
    return all(array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous() for array in arrays)


def contiguous(array: Any) -> Any:
    """Return a contiguous array of the same numbers; itself if it is."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def empty_like(array: Any, shape: Sequence[int], dtype: str | None = None) -> Any:
    """Return an array of the same kind whose numbers are yet to be written. `dtype` None: that of the array."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype if dtype is None else host_dtype(dtype))
    if dtype is None:
        return array.new_empty(tuple(shape))
    from tokenmill.platform.device_arrays import DeviceArrays

    return DeviceArrays(array.device).empty(shape, dtype)


def zeros_like(array: Any, shape: Sequence[int]) -> Any:
    """Return an array of the same kind and dtype, of zeros."""
    return np.zeros(shape, array.dtype) if isinstance(array, np.ndarray) else array.new_zeros(tuple(shape))


def float32(array: Any) -> Any:
    """Return the numbers of an array of bfloat16 or float32 in float32."""
    if not isinstance(array, np.ndarray):
        return array.float()
    return StoredArray(array, "BF16" if array.dtype == np.uint16 else "F32").float32()


def bfloat16(array: Any) -> Any:
    """Return the numbers of an array of bfloat16 or float32 in bfloat16."""
    if not isinstance(array, np.ndarray):
        return array.bfloat16()
    return StoredArray(array, "BF16" if array.dtype == np.uint16 else "F32").bfloat16()


def rounded(number: float, dtype: str) -> float:
    """Return a number rounded to a type of floats."""
    wide = np.array([number], np.float32)
    return float(float32(bfloat16(wide))[0] if dtype == "bfloat16" else wide.astype(dtype)[0])


def add_scaled(sums: Any, x: Any, scale: float) -> None:
    """Add scale * x to sums in place, both of bfloat16 or float32, rounded once to float32 and to the sums' dtype."""
    if not isinstance(sums, np.ndarray):
        sums.copy_(sums.float().add_(x.float(), alpha=scale))
        return
    # The product of two numbers of float32 is exact in float64.
    exact = float32(sums) + float32(x).astype(np.float64) * np.float32(scale)
    sums[...] = bfloat16(exact.astype(np.float32)) if sums.dtype == np.uint16 else exact


def as_like(array: Array, values: Any) -> Any:
    """Return NumPy's values as of the kind, and on the device, that an array is of."""
    if isinstance(array, np.ndarray):
        return values
    # Imported here: native kernels run where there is no torch.
    from tokenmill.model.kernels.stored_tensors import tensor_over

    return tensor_over(values).to(array.device)


def host_floats(array: Any) -> npt.NDArray[np.float32]:
    """Return the numbers of an array of bfloat16 or float32 as float32 in NumPy."""
    wide = float32(array)
    return wide if isinstance(array, np.ndarray) else wide.cpu().numpy()
