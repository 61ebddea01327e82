"""Sums of ranks in one launch, over memory that all devices map; everything else is left to another communicator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.kernels.triton.all_reduce import BLOCK_BYTES, RankSums
from tokenmill.platform.communicator import Communicator
from tokenmill.platform.protocol import Platform

# Each rank reads this much of the others in one launch: some 2.5 us at 450 GB/s. Beyond, NCCL's rings move fewer bytes.
MOST_READ = 1 << 20


class OneShotCommunicator:
    """A `Communicator` whose small sums are one launch of our own kernel, with the same bits at any size.

    Args:
        rest: sees to everything else.
        platform: of the device.
        meeting: path that all ranks know, of a file that does not exist yet.
        seconds: how long a rank waits for the others.
        is_whole: larger sums are made of small ones, so that none depends on a step's size; else `rest` makes them.

    Raises:
        InvalidConfig: these devices cannot read each other's memory.
    """

    def __init__(
        self,
        rest: Communicator,
        platform: Platform,
        meeting: Path,
        rank: int,
        size: int,
        seconds: float,
        is_whole: bool = False,
    ) -> None:
        self._rest = rest
        self._is_whole = is_whole
        self._most_bytes = most_bytes(size)
        num_bytes = RankSums.memory_bytes(self._most_bytes, size)
        try:
            self._memory = platform.peer_memory(meeting, rank, size, num_bytes, seconds)
        except RuntimeError as error:
            raise InvalidConfig(
                f"--all-reduce one-shot: these GPUs cannot map each other's memory ({error}); use --all-reduce nccl"
            ) from error
        # Read by the device while it waits: other than 0 when the ranks are given up.
        self._word = torch.as_tensor(platform.pinned(8)).view(torch.int64)
        self._word.zero_()
        words = [self._word.data_ptr()] * (1 << size.bit_length())
        addresses = torch.tensor([*self._memory.addresses, *words][: len(words)], device=platform.device)
        turns = torch.zeros(RankSums.num_programs(self._most_bytes), dtype=torch.int64, device=platform.device)
        self._sums = RankSums(self._most_bytes, rank, size, addresses, turns)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of `own` over all ranks, in its memory."""
        own = own.contiguous()
        if own.nbytes <= self._most_bytes:
            self._sums.add_up(own)
        elif self._is_whole:
            for piece in own.view(-1).split(self._most_bytes // own.element_size()):
                self._sums.add_up(piece)
        else:
            return self._rest.sum(own)
        return own

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks: [ranks, *shape]."""
        return self._rest.gather(own)

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's numbers to all ranks, in place, and return them."""
        return self._rest.share(numbers)

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        """Begin to copy rank 0's numbers to the others."""
        return self._rest.offer(numbers)

    def abort(self) -> None:
        """Leave the other ranks: end sums that wait for them, and all other work that does."""
        self._word.fill_(1)
        self._rest.abort()


def most_bytes(size: int) -> int:
    """Return the bytes of the largest sum that `size` ranks make in one launch: whole programs'."""
    return MOST_READ // max(1, size - 1) // BLOCK_BYTES * BLOCK_BYTES
