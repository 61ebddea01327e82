"""Memory of tensors: zeroed ones that cost nothing until they are used, and scratch that is used again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.platform.memory import zeroed_bytes


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of the host as an array over the same memory; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Return a zeroed tensor; on the CPU in memory from `zeroed_bytes`.

    `torch.zeros` writes every byte at once: seconds at start, and memory taken for requests that never come.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(zeroed_bytes(size)).view(dtype).view(*shape)


class Scratch:
    """Memory that is written anew in every layer, kept mapped and, if small, in the CPU's cache.

    One tensor at a time: the next `take` overwrites it.
    """

    __slots__ = ("_memory",)

    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> torch.Tensor:
        """Return an uninitialized contiguous tensor, valid until the next call; grow to the largest asked for."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)
