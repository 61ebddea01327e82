"""Memory of ranks that each of them can read and write by address, on whichever device it lies."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import msgspec
import torch


class PeerMemory(msgspec.Struct, frozen=True):
    """As one rank sees it.

    Attributes:
        addresses: where the memory of each rank lies in this rank's address space.
        keeps: objects that keep the memory mapped.
    """

    addresses: list[int]
    keeps: tuple[object, ...]


def over_file(meeting: Path, size: int, num_bytes: int) -> PeerMemory:
    """Map memory that processes on CPUs share, zeros at first: a stand-in for memory of GPUs.

    Args:
        meeting: path that all ranks know, of a file that none has made before.
    """
    descriptor = os.open(meeting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size * num_bytes)
    finally:
        os.close(descriptor)
    memory = torch.from_file(str(meeting), shared=True, size=size * num_bytes, dtype=torch.uint8)
    return PeerMemory([memory.data_ptr() + one * num_bytes for one in range(size)], (memory,))


def over_gpus(meeting: Path, rank: int, size: int, num_bytes: int, seconds: float, device: str) -> PeerMemory:
    """Map memory of the GPUs of one machine into each other, zeros at first, by torch's symmetric memory.

    Args:
        meeting: path that all ranks know, of a file that does not exist yet.
        seconds: how long a rank waits for the others.

    Raises:
        RuntimeError: these GPUs cannot read each other's memory.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import FileStore

    store = FileStore(str(meeting), size)
    store.set_timeout(timedelta(seconds=seconds))
    group = str(meeting)
    _SymmetricMemory.set_group_info(group, rank, size, store)
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, torch.device(device), group)
    assert not int(own.zero_()[-1])  # waits: it is zeros before any rank knows where it is
    handle = _SymmetricMemory.rendezvous(own, group)
    return PeerMemory([int(address) for address in handle.buffer_ptrs], (own, handle, store))
