"""Communication between ranks: numbers go from device to device, in the order of the device's queue of work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch


class Communicator(Protocol):
    """The devices of ranks, as one of them sees them. All ranks make the same calls in the same order."""

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of `own` over all ranks, in the memory of `own`."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, which have one shape: [ranks, *shape]."""

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's numbers to all ranks, into the memory of `numbers`, and return them."""

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        """Rank 0: begin to copy its numbers to the ranks that call `share`, beside whatever is issued later.

        Returns:
            Puts later work behind the copy. Until then nothing may write to `numbers`, whose memory must be kept.
        """

    def abort(self) -> None:
        """Leave the other ranks: end the work that waits for them, and do no more."""


class NoPeers:
    """The `Communicator` of a rank that has its part of each layer to itself."""

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return `own`."""
        return own

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return `own` as the tensors of one rank."""
        return own.unsqueeze(0)

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers."""
        return numbers

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        """Copy to nobody."""
        return lambda: None

    def abort(self) -> None:
        """Do nothing: there is nobody to leave."""


class TorchCommunicator:
    """A `Communicator` over a process group of torch.distributed that belongs to this engine alone.

    It never uses torch's own group of the whole process, which may be a trainer's.

    Args:
        group: a backend, `ProcessGroupNCCL` or `ProcessGroupGloo`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of `own` over all ranks."""
        from torch.distributed import AllreduceOptions

        own = own.contiguous()
        _end(self._group.allreduce([own], _in_order(AllreduceOptions())))
        return own

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks: [ranks, *shape]."""
        from torch.distributed.distributed_c10d import AllgatherOptions

        own = own.contiguous()
        every = own.new_empty(self._group.size(), *own.shape)
        _end(self._group._allgather_base(every.view(-1), own.view(-1), _in_order(AllgatherOptions())))
        return every

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's numbers to all ranks, in place, and return them."""
        from torch.distributed import BroadcastOptions

        _end(self._group.broadcast([numbers], _in_order(BroadcastOptions())))
        return numbers

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        """Begin to copy rank 0's numbers to the others, on a stream of the group's own."""
        from torch.distributed import BroadcastOptions

        work = self._group.broadcast([numbers], BroadcastOptions())
        return lambda: _end(work)

    def abort(self) -> None:
        """Abort the process group."""
        self._group.abort()


def _in_order(options: Any) -> Any:
    """Return the options of a call that runs on the current stream, not on one of NCCL's own that is joined by events:
    half the nodes in a graph, and nothing between it and the kernel behind it."""
    options.asyncOp = False
    return options


def _end(work: Any) -> None:
    """Put later work behind a call. A call on the current stream may have nothing to wait for."""
    if work is not None:
        work.wait()


def over_gloo(meeting: Path, rank: int, size: int, seconds: float) -> TorchCommunicator:
    """Connect processes on CPUs by gloo, which stands in for NCCL where there are no GPUs.

    Args:
        meeting: path that all ranks know, of a file that does not exist yet.
        seconds: how long a rank waits for the others.
    """
    from torch.distributed import FileStore, ProcessGroupGloo

    return TorchCommunicator(ProcessGroupGloo(FileStore(str(meeting), size), rank, size, timedelta(seconds=seconds)))


def over_nccl(meeting: Path, rank: int, size: int, seconds: float) -> TorchCommunicator:
    """Connect the GPUs of one machine by NCCL; the arguments are those of `over_gloo`."""
    from torch.distributed import FileStore, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    communicator = TorchCommunicator(ProcessGroupNCCL(FileStore(str(meeting), size), rank, size, options))
    # NCCL connects with the first call, which a capture does not allow.
    communicator.sum(torch.zeros(1, device="cuda"))
    return communicator
