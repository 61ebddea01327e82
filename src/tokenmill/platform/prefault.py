"""Memory that is handed out before it is used.

What a process has asked for it gets at the first use, a page at a time, and that can be slow: 2 MB are cleared first,
and a virtual machine may have to ask its host. In a step that would wait for each of its layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Sequence

import torch

# So much of each tensor at a time: what the system hands out at once.
CHUNK = 2 << 20
_PAGE = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_LOWEST_PRIORITY = 19


def prefault(tensors: Sequence[torch.Tensor]) -> threading.Thread:
    """Have the memory of tensors handed out in the background; they are not changed.

    The thread has the lowest priority, and ends early with the tensors or where the system does not know how.

    Args:
        tensors: [n, ...] on the CPU, in one piece; the n parts of all are taken side by side from their beginnings.
    """
    thread = threading.Thread(
        target=_prefault, args=([weakref.ref(tensor) for tensor in tensors],), name="prefault", daemon=True
    )
    thread.start()
    return thread


def _prefault(tensors: Sequence[weakref.ref[torch.Tensor]]) -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    start, num_open = 0, len(tensors)
    while num_open:
        num_open = 0
        for reference in tensors:
            tensor = reference()
            if tensor is None or not _hand_out(tensor, start):
                return
            num_open += start + CHUNK < tensor[0].nbytes
        start += CHUNK


def _hand_out(tensor: torch.Tensor, start: int) -> bool:
    """One chunk of each part; False where the system does not do it."""
    try:
        # ctypes gives up the interpreter lock for a call.
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return False
    for part in tensor:
        first = (part.data_ptr() + start) // _PAGE * _PAGE
        end = part.data_ptr() + min(start + CHUNK, part.nbytes)
        if first < end and madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_POPULATE_WRITE):
            return False
    return True
