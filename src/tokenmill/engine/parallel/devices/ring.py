"""The ring of stages on devices: hidden states go from stage to stage, and the outputs from the last one to the first.

    stage 0 ── hidden states ──> stage 1 ── hidden states ──> stage 2
       ^─────────────────────── normed outputs ────────────────────┘

Each arrow is a communicator of two ranks. What is sent travels beside the layers that run meanwhile, so that a stage
goes on with the next step although its neighbour is not there yet; what is received is waited for on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from tokenmill.platform.communicator import Communicator


class StageRing:
    """The two ends of the ring that a rank has: each rank of a stage has those to its peers in the stages beside it.

    Every stage knows from the plan how many rows come and go. Without any, nothing is sent.

    Args:
        source: from the stage before, of which this rank is number 1. target: to the next one, of which it is number 0.
        most: tensors that are on their way at a time; with one more, later work waits for the first of them.
    """

    def __init__(self, source: Communicator, target: Communicator, most: int) -> None:
        self._source = source
        self._target = target
        self._most = most
        self._sent: deque[tuple[torch.Tensor, Callable[[], object]]] = deque()

    def send(self, hidden: torch.Tensor) -> None:
        """Begin to send hidden states, contiguous, to the next stage. Nothing may write to them any more."""
        if not len(hidden):
            return
        if len(self._sent) == self._most:
            _, wait = self._sent.popleft()
            wait()
        self._sent.append((hidden, self._target.offer(hidden)))

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill memory with what the stage before has sent, and return it; later work waits for that."""
        return self._source.share(hidden) if len(hidden) else hidden

    def abort(self) -> None:
        """Leave the other stages."""
        self._source.abort()
        self._target.abort()
