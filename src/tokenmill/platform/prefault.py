"""Have the system hand out memory before it is used, or little of it.

A process gets the memory it has asked for at the first use, a page at a time. This can be slow: 2 MB are cleared first,
and a virtual machine may have to ask its host. A step would wait for that in each of its layers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenmill.platform.arrays import address
from tokenmill.platform.memory import HUGE_PAGE

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# So much at a time: what the system hands out at once, within a millisecond if it has it.
CHUNK = 2 << 20
_PAGE = 4096
_MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 15, 23  # the latter since Linux 5.14


def begin_small(arrays: Sequence[Array]) -> None:
    """Have the system hand out the beginnings of arrays in small pages: few tokens then touch few bytes of each layer.

    Args:
        arrays: [n, ...] on the CPU, in one piece; the first huge page that lies wholly in each of the n parts stays
            small, with what is before it. Parts of other systems than Linux are left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    for array in arrays:
        for part in array:
            begin = address(part) // _PAGE * _PAGE
            size = min((-(-begin // HUGE_PAGE) + 1) * HUGE_PAGE, address(part) + part.nbytes) - begin
            # A system without huge pages refuses, and has handed out small ones all along.
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_NOHUGEPAGE)


def prefault(arrays: Sequence[Array]) -> Iterator[None]:
    """Have the system hand out the memory of arrays, a chunk at each iteration of the iterator; they are not changed.

    The iterator ends early where the system cannot do this.

    Args:
        arrays: [n, ...] on the CPU, in one piece; the n parts of all are taken side by side from their beginnings.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    parts = [(address(part), address(part) + part.nbytes) for array in arrays for part in array]
    for start in range(0, max((end - begin for begin, end in parts), default=0), CHUNK):
        for begin, end in parts:
            first = (begin + start) // _PAGE * _PAGE
            size = min(begin + start + CHUNK, end) - first
            if size > 0 and madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return
            yield
