"""Memory for large tensors: zeroed ones that cost nothing until they are used, and scratch that is used again."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

HUGE_PAGE = 2 << 20
HUGE_PAGE_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A zeroed tensor; on the CPU the kernel hands out its memory page by page as it is first written.

    It starts with a page of memory, so that vector loads do not cross two cache lines; what is large asks for huge
    pages, whose addresses a CPU looks up less often. `torch.zeros` writes every byte at once: seconds at start, and
    memory taken for requests that never come.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(*shape)


class Scratch:
    """Memory that is written anew in every layer, kept mapped and, if small, in the CPU's cache.

    One tensor at a time: the next `take` overwrites it.
    """

    __slots__ = ("_memory",)

    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialized contiguous tensor, valid until the next call; grows to the largest that was asked for."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


def huge_pages(switch: Path = HUGE_PAGE_SWITCH) -> str:
    """Whether this system gives large tensors huge pages, in words for the start-up screen."""
    try:
        words = switch.read_text()
    except OSError:
        words = "[never]"
    return "no huge pages: the system has them off" if "[never]" in words else "weights and KV in huge pages"
