"""Memory of the host: zeroed, shared between processes, or cut into pieces. Memory of tensors: `tensor_memory`."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

HUGE_PAGE = 2 << 20
CACHE_LINE = 64
# What is let go of here is gone at once, and reads as zeros.
GIVES_BACK = sys.platform == "linux"
HUGE_PAGE_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def zeroed_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory, of at least a byte, which the kernel hands out page by page as it is first written.

    It starts at a page boundary, so that vector loads do not cross two cache lines; a large one asks for huge pages,
    whose addresses a CPU looks up less often.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def map_shared(descriptor: int, num_bytes: int, is_writable: bool) -> npt.NDArray[np.uint8]:
    """Map a file's bytes as memory shared by all its mappings, in huge pages where its file system has them.

    An array of a mapping that is not writable is not either: NumPy refuses, and a kernel that writes by address would
    end the process. The descriptor is held as long as the array, with the locks on it, even if it is closed.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=access)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def shared_bytes(num_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Return zeroed memory that other processes of this user can map, and the descriptor of its file without a name."""
    descriptor = os.memfd_create("tokenmill-kv")
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, num_bytes)
    return map_shared(descriptor, num_bytes, is_writable=True), descriptor


class Arena:
    """Cuts arrays from one piece of memory, in the order in which they are asked for, each at a cache line.

    Args:
        memory: [n] uint8; it starts at a page boundary.
    """

    __slots__ = ("_memory", "_used")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self._used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes, uint8, as they are."""
        start, self._used = self._used, self._used + self.room(num_bytes)
        assert self._used <= len(self._memory), "an arena is made as large as all that is taken from it"
        return self._memory[start : start + num_bytes]

    @staticmethod
    def room(num_bytes: int) -> int:
        """Return the bytes that an array of `num_bytes` takes, in whole cache lines."""
        return -(-num_bytes // CACHE_LINE) * CACHE_LINE


def give_back(array: Array) -> None:
    """Give the memory of an array back to the system, but for parts of pages at its ends; it reads as zeros then.

    Args:
        array: of memory of its own (anonymous, private), in one piece.
    """
    assert GIVES_BACK, "elsewhere the system may keep the contents"
    begin = -(-address(array) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address(array) + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Return to the system what this process has freed and malloc keeps for later, where it can be asked to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def huge_pages(switch: Path = HUGE_PAGE_SWITCH) -> str:
    """Say whether this system gives large tensors huge pages, in words for the start-up screen."""
    try:
        words = switch.read_text()
    except OSError:
        words = "[never]"
    return "no huge pages: the system has them off" if "[never]" in words else "weights and KV in huge pages"
