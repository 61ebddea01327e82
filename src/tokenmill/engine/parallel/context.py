"""Ranks that share a context: what attention needs of them, over memory that all map, and the model of rank 0."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.engine.parallel.messages import RunPass
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.model import Hidden, Model
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.kernels.native import MODULE
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import AnyArray

# Partial results of a layer that ranks leave for each other; where a step needs more, its tiles stay whole.
PARTIAL_NUMBERS = 8 << 20
PENDING_NUMBERS = 1 << 16


class SharedContext:
    """The `ContextRanks` of one machine.

    Args:
        memory: joined by all ranks before anything is taken.
        max_tokens: tokens of the largest step.
        patience: seconds within which all ranks take the same memory.
    """

    def __init__(self, memory: SharedMemory, max_tokens: int, patience: float) -> None:
        self._memory = memory
        self._max_tokens = max_tokens
        self._patience = patience
        self._meeting_places: list[npt.NDArray[np.uint8]] = []  # mapped as long as native code has their addresses

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._memory.shard.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._memory.shard.size

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed memory behind what was taken before, the same for all ranks."""
        return self._memory.extend(num_bytes, self._patience)

    def native(self, output_size: int) -> _native.ContextRanks:
        """Return a meeting place with memory for partial results and outputs."""
        output_numbers = self._max_tokens * output_size
        memory = self.take((PARTIAL_NUMBERS + PENDING_NUMBERS) * 4 + 2 * output_numbers * 2)
        self._meeting_places.append(memory)
        sizes = PARTIAL_NUMBERS, PENDING_NUMBERS, output_numbers
        ranks: _native.ContextRanks = importlib.import_module(MODULE).ContextRanks(
            self._memory.native.ranks, self.rank, self.size, address(memory), *sizes
        )
        return ranks

    def meet(self) -> None:
        """Wait until all ranks have come."""
        self._memory.meet()

    def rows(self, own: AnyArray, where: AnyArray | slice, count: int) -> AnyArray:
        """Gather the rows of all ranks, each in its place."""
        return self._memory.rows(own, where, count)

    def failure(self) -> Exception:
        """Give up, and return why."""
        return self._memory.failure()


class ContextModel:
    """The model of rank 0, whose passes run on all ranks; each has all of the weights. Rank 0 alone uses the head."""

    def __init__(self, own: Model, memory: SharedMemory) -> None:
        self._own = own
        self._memory = memory

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Hidden:
        """Run a pass on all ranks and return the final hidden states of its outputs."""
        with self._memory.together():
            self._memory.post(RunPass.from_batch(batch))
            return self._own.forward(batch, attention)

    def logits(self, outputs: Hidden) -> AnyArray:
        """Return the logits of all tokens."""
        return self._own.logits(outputs)

    def argmax(self, outputs: Hidden) -> AnyArray:
        """Return the most likely tokens."""
        return self._own.argmax(outputs)
