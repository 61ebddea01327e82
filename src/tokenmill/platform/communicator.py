"""What ranks on devices tell each other: numbers that go from device to device, in the order of its queue of work."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch


class Communicator(Protocol):
    """The devices of ranks, as one of them sees them. All ranks make the same calls in the same order."""

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """What all ranks have, added up; in the memory of `own`."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """What all ranks have, of one shape: [ranks, *shape]."""

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """What rank 0 has; in the memory of `numbers`."""

    def abort(self) -> None:
        """Let go of the others: work that waits for them ends, and there is no further."""


class TorchCommunicator:
    """See `Communicator`: by a process group of torch.distributed, of this engine alone.

    It is none of those that torch keeps for a whole process: that one may be a trainer's.

    Args:
        group: a backend, `ProcessGroupNCCL` or `ProcessGroupGloo`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.sum`."""
        own = own.contiguous()
        self._group.allreduce([own]).wait()
        return own

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.gather`."""
        own = own.contiguous()
        every = own.new_empty(self._group.size(), *own.shape)
        self._group._allgather_base(every.view(-1), own.view(-1)).wait()
        return every

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `Communicator.share`."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([numbers], options).wait()
        return numbers

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self._group.abort()


def over_gloo(meeting: Path, rank: int, size: int, seconds: float) -> TorchCommunicator:
    """Between processes on CPUs: what stands in for NCCL where there are no GPUs.

    Args:
        meeting: a file that all ranks know, and that does not exist before.
        seconds: how long one waits for the others.
    """
    from torch.distributed import FileStore, ProcessGroupGloo

    return TorchCommunicator(ProcessGroupGloo(FileStore(str(meeting), size), rank, size, timedelta(seconds=seconds)))


def over_nccl(meeting: Path, rank: int, size: int, seconds: float) -> TorchCommunicator:
    """Between GPUs of one machine; see `over_gloo`."""
    from torch.distributed import FileStore, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    communicator = TorchCommunicator(ProcessGroupNCCL(FileStore(str(meeting), size), rank, size, options))
    # NCCL connects with the first call, which a capture does not allow.
    communicator.sum(torch.zeros(1, device="cuda"))
    return communicator
