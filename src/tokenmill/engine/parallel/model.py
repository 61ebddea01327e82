"""The model of rank 0's runner: it posts each pass to the other ranks and does its own part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tokenmill.engine.parallel.messages import FindBest, RunPass, TakeLogits
from tokenmill.engine.parallel.pipeline.chain import FirstStage
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend


class PartialModel(Protocol):
    """A rank's decoder: `forward` runs with all ranks, the head covers its own tokens only; see `Decoder`."""

    def forward(
        self, batch: ForwardBatch, attention: AttentionBackend, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the final hidden states of the batch's outputs; before the last stage, those of all its tokens."""

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of its tokens."""

    def best(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely of its tokens, and their logits."""


class RankedModel:
    """The model of rank 0, whose calls run on all ranks."""

    def __init__(self, own: PartialModel, memory: SharedMemory, stages: FirstStage | None = None) -> None:
        """
        Args:
            stages: the stages behind this one; None: absent.
        """
        self._own = own
        self._memory = memory
        self._stages = stages

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run a pass on all ranks and return the final hidden states of its outputs."""
        return self.begin_pass(batch, attention)()

    def begin_pass(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], torch.Tensor]:
        """Post a pass and run the first layers; return a function that waits for the outputs."""
        run = RunPass.from_batch(batch)
        with self._memory.together():
            self._memory.post(run)
            hidden = self._own.forward(batch, attention)
            if self._stages is None:
                return lambda: hidden
            number = self._stages.begin_pass(run, hidden)
        return partial(self._outputs, self._stages, number, hidden)

    def _outputs(self, stages: FirstStage, number: int, hidden: torch.Tensor) -> torch.Tensor:
        with self._memory.together():
            return stages.outputs(number, hidden.dtype, hidden.shape[1])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks, in shared memory that the next call overwrites."""
        parts = outputs.split(self._memory.layout.head_rows)
        if len(parts) == 1:
            return self._logits(outputs)
        return torch.cat([self._logits(part).clone() for part in parts])

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return, of each rank's best tokens, the one with the largest logit, of equal ones the lowest."""
        return torch.cat([self._argmax(part) for part in outputs.split(self._memory.layout.head_rows)])

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        with self._memory.together():
            count = self._hand_over(outputs)
            self._memory.post(TakeLogits(count))
            take_logits(self._own, self._memory, outputs)
        return self._memory.logits(count)

    def _argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        with self._memory.together():
            count = self._hand_over(outputs)
            self._memory.post(FindBest(count))
            find_best(self._own, self._memory, outputs)
        ids, values = (tensor.numpy() for tensor in self._memory.best(count))
        # The first of equals, and NaN before any number: ranks have the tokens in the order of their ids.
        ranks, rows = values.argmax(0), np.arange(count)
        return torch.from_numpy(np.where(np.isfinite(values[ranks, rows]), ids[ranks, rows], -1))

    def _hand_over(self, outputs: torch.Tensor) -> int:
        self._memory.inputs(len(outputs), outputs.dtype).copy_(outputs)
        return len(outputs)


def take_logits(own: PartialModel, memory: SharedMemory, outputs: torch.Tensor) -> None:
    """Write this rank's logits for outputs [S, hidden_size] to where rank 0 finds them."""
    logits, tokens = memory.logits(len(outputs)), memory.shard.part(memory.layout.vocab_size)
    logits[:, tokens.start : tokens.stop] = own.logits(outputs)
    memory.meet()


def find_best(own: PartialModel, memory: SharedMemory, outputs: torch.Tensor) -> None:
    """Write this rank's most likely tokens for outputs [S, hidden_size] to where rank 0 finds them."""
    for all_ranks, own_rank in zip(memory.best(len(outputs)), own.best(outputs), strict=True):
        all_ranks[memory.shard.rank] = own_rank
    memory.meet()
