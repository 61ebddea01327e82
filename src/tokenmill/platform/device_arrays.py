"""`DeviceArrays`: a device's `ArrayLibrary`, which is torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.platform.memory import zeros


class DeviceArrays:
    """See `ArrayLibrary`.

    Args:
        device: where arrays are made.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a tensor of zeros."""
        return zeros(shape, getattr(torch, dtype), self._device)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> torch.Tensor:
        """Return a tensor of one value."""
        return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=self._device)

    def arange(self, count: int, dtype: str) -> torch.Tensor:
        """Return 0, 1 ... count - 1."""
        return torch.arange(count, dtype=getattr(torch, dtype), device=self._device)

    def astype(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return a tensor in another dtype; itself if it has it."""
        return array.to(getattr(torch, dtype))

    def at_least(self, array: torch.Tensor, least: int) -> torch.Tensor:
        """Return a tensor with `least` in place of what is smaller."""
        return array.clamp(min=least)

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is."""
        return array
