"""`DeviceArrays`: a device's `ArrayLibrary`, which is torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from tokenmill.platform.tensor_memory import zeros


class DeviceArrays:
    """See `ArrayLibrary`.

    Args:
        device: where arrays are made.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a tensor of zeros."""
        return zeros(shape, getattr(torch, dtype), self._device)

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a tensor whose numbers are yet to be written."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> torch.Tensor:
        """Return a tensor of one value."""
        return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=self._device)

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same numbers in memory of its own."""
        return array.clone()

    def from_host(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return an array of the host as a tensor of the device; it is there before later work of the device begins."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def arange(self, count: int, dtype: str) -> torch.Tensor:
        """Return 0, 1 ... count - 1."""
        return torch.arange(count, dtype=getattr(torch, dtype), device=self._device)

    def astype(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return a tensor in another dtype; itself if it has it."""
        return array.to(getattr(torch, dtype))

    def at_least(self, array: torch.Tensor, least: int) -> torch.Tensor:
        """Return a tensor with `least` in place of what is smaller."""
        return array.clamp(min=least)

    def where(
        self, condition: torch.Tensor, then: torch.Tensor | float, otherwise: torch.Tensor | float
    ) -> torch.Tensor:
        """Return `then` where a condition holds, and `otherwise` elsewhere."""
        return torch.where(condition, then, otherwise)

    def add_at(self, array: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> None:
        """Add values to places of a tensor, of which one may occur several times."""
        array.index_put_(places, values, accumulate=True)

    def counts(self, numbers: torch.Tensor, is_counted: torch.Tensor, size: int) -> torch.Tensor:
        """Return how often the number at each place is counted in its row, [n, L] float32."""
        found = torch.zeros((len(numbers), size), dtype=torch.float32, device=self._device)
        return found.scatter_add_(1, numbers, is_counted.to(torch.float32)).gather(1, numbers)

    def tensor(self, array: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is."""
        return array
