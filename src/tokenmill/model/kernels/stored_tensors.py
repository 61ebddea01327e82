"""The door between stored numbers, which are arrays, and kernels that compute in torch: tensors of the same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.model.quantization.packed import Rows, dense
from tokenmill.model.quantization.stored_array import StoredArray

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# Floats by safetensors' names; integers are arrays in either.
_FLOATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
)


def tensor_of(stored: StoredArray) -> torch.Tensor:
    """Return the numbers as a tensor that shares their memory."""
    tensor = torch.from_numpy(stored.values.view(np.int16) if stored.dtype == "BF16" else stored.values)
    return tensor.view(torch.bfloat16) if stored.dtype == "BF16" else tensor


def tensor_over(array: Array) -> torch.Tensor:
    """Return kernels' numbers as a tensor over the same memory: an array of uint16 as bfloat16, a tensor as it is.

    That of an array that must not be written must not be either.
    """
    if isinstance(array, torch.Tensor):
        return array
    is_half = array.dtype == np.uint16
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array.view(np.int16) if is_half else array)
    return tensor.view(torch.bfloat16) if is_half else tensor


def fill_vector(vector: Array, values: StoredArray | torch.Tensor) -> None:
    """Set the numbers of a vector, an array or a tensor, to values of as many."""
    own = tensor_over(vector)
    own.copy_((tensor_of(values) if isinstance(values, StoredArray) else values).view_as(own))


def stored(tensor: torch.Tensor) -> StoredArray:
    """Return floats as an array, which shares the memory of a tensor on the CPU; of other types than the usual three,
    as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _FLOATS:
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:
        return StoredArray(tensor.view(torch.int16).numpy().view(np.uint16), "BF16")
    return StoredArray(tensor.numpy(), _FLOATS[tensor.dtype])


def floats(rows: Rows | torch.Tensor) -> torch.Tensor:
    """Return rows as floats, dequantized; a tensor as it is."""
    return rows if isinstance(rows, torch.Tensor) else tensor_of(dense(rows))
