"""Memory that is written anew in every layer, held on to so that it stays mapped and, if small, in the CPU's cache."""

from __future__ import annotations

import math

import torch


class Scratch:
    """One tensor at a time; the next `take` overwrites it."""

    __slots__ = ("_memory",)

    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialized contiguous tensor, valid until the next call; grows to the largest that was asked for."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)
