"""The model of rank 0's runner: it posts each pass to the other ranks and does its own part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.engine.parallel.messages import FindBest, RunPass, TakeLogits
from tokenmill.engine.parallel.pipeline.chain import FirstStage
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.model import Hidden
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.platform.host_arrays import host_array

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray


class PartialModel(Protocol):
    """A rank's decoder: `forward` runs with all ranks, the head covers its own tokens only; see `Decoder`."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, hidden: Hidden | None = None) -> Hidden:
        """Return the final hidden states of the batch's outputs; before the last stage, those of all its tokens."""

    def logits(self, outputs: Hidden) -> AnyArray:
        """Return the logits of its tokens."""

    def best(self, outputs: Hidden) -> tuple[AnyArray, AnyArray]:
        """Return the most likely of its tokens, and their logits."""


class RankedModel:
    """The model of rank 0, whose calls run on all ranks."""

    def __init__(
        self, own: PartialModel, memory: SharedMemory, stages: FirstStage | None = None, reads_kv: bool = False
    ) -> None:
        """
        Args:
            stages: the stages behind this one; None: absent.
            reads_kv: this rank reads the others' KV between two steps: a pass ends when all have written theirs.
        """
        self._own = own
        self._memory = memory
        self._stages = stages
        self._reads_kv = reads_kv

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Hidden:
        """Run a pass on all ranks and return the final hidden states of its outputs."""
        return self.begin_pass(batch, attention)()

    def begin_pass(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], Hidden]:
        """Post a pass and run the first layers; return a function that waits for the outputs."""
        run = RunPass.from_batch(batch)
        with self._memory.together():
            self._memory.post(run)
            hidden = self._own.forward(batch, attention)
            if self._reads_kv:
                self._memory.meet()
            if self._stages is None:
                return lambda: hidden
            number = self._stages.begin_pass(run.behind_embeddings(), hidden)
        return partial(self._outputs, self._stages, number, hidden)

    def _outputs(self, stages: FirstStage, number: int, hidden: Hidden) -> Hidden:
        with self._memory.together():
            return stages.outputs(number, hidden)

    def logits(self, outputs: Hidden) -> npt.NDArray[np.float32]:
        """Return the logits of all ranks, in shared memory that the next call overwrites."""
        parts = self._parts(outputs)
        if len(parts) == 1:
            return self._logits(outputs)
        return np.concatenate([self._logits(part).copy() for part in parts])

    def argmax(self, outputs: Hidden) -> npt.NDArray[np.int64]:
        """Return, of each rank's best tokens, the one with the largest logit, of equal ones the lowest."""
        return np.concatenate([self._argmax(part) for part in self._parts(outputs)])

    def _parts(self, outputs: Hidden) -> list[Hidden]:
        """Return the outputs in pieces for which there is room, at least one."""
        most = self._memory.layout.head_rows
        return [outputs[start : start + most] for start in range(0, max(len(outputs), 1), most)]

    def _logits(self, outputs: Hidden) -> npt.NDArray[np.float32]:
        with self._memory.together():
            count = self._hand_over(outputs)
            self._memory.post(TakeLogits(count))
            take_logits(self._own, self._memory, outputs)
        return self._memory.logits(count)

    def _argmax(self, outputs: Hidden) -> npt.NDArray[np.int64]:
        with self._memory.together():
            count = self._hand_over(outputs)
            self._memory.post(FindBest(count))
            find_best(self._own, self._memory, outputs)
        ids, values = self._memory.best(count)
        # The first of equals, and NaN before any number: ranks have the tokens in the order of their ids.
        ranks, rows = values.argmax(0), np.arange(count)
        found: npt.NDArray[np.int64] = np.where(np.isfinite(values[ranks, rows]), ids[ranks, rows], -1)
        return found

    def _hand_over(self, outputs: Hidden) -> int:
        numbers: npt.NDArray[Any] = host_array(outputs)
        self._memory.inputs(len(numbers), numbers.dtype.name)[:] = numbers
        return len(numbers)


def take_logits(own: PartialModel, memory: SharedMemory, outputs: Hidden) -> None:
    """Write this rank's logits for outputs [S, hidden_size] to where rank 0 finds them."""
    logits, tokens = memory.logits(len(outputs)), memory.shard.part(memory.layout.vocab_size)
    logits[:, tokens.start : tokens.stop] = own.logits(outputs)
    memory.meet()


def find_best(own: PartialModel, memory: SharedMemory, outputs: Hidden) -> None:
    """Write this rank's most likely tokens for outputs [S, hidden_size] to where rank 0 finds them."""
    ids, values = memory.best(len(outputs))
    ids[memory.shard.rank], values[memory.shard.rank] = own.best(outputs)
    memory.meet()
