"""The model of a rank on a device, of one of several stages, and how it finds its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenmill.engine.parallel.devices.collective import DeviceCollective, DeviceModel
from tokenmill.engine.parallel.devices.ring import StageRing
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.sharding.shard import Shard
from tokenmill.platform.communicator import Communicator, NoPeers

if TYPE_CHECKING:
    from tokenmill.model.models.decoder import Decoder

Meet = Callable[[str, int, int], Communicator]
"""Name of a communicator, number of this rank in it, and how many there are -> the communicator."""


def connect(shard: Shard, meet: Meet, meet_beside: Meet, most: int) -> DeviceCollective:
    """Connect a rank to those beside it and, of several stages, to its peers in the stages before and behind its own.

    Args:
        meet_beside: connects the ranks that share layers, and add up. meet: connects two stages.
        most: steps that are under way at a time.
    """
    beside = meet_beside(f"devices-{shard.stage}", shard.rank, shard.size) if shard.size > 1 else NoPeers()
    if shard.num_stages == 1:
        return DeviceCollective(shard, beside)
    # In the order of their numbers on all ranks, so that no two wait for each other.
    ways = sorted({shard.stage, (shard.stage - 1) % shard.num_stages})
    ends = {way: meet(f"way-{way}-{shard.rank}", int(way != shard.stage), 2) for way in ways}
    ring = StageRing(ends[(shard.stage - 1) % shard.num_stages], ends[shard.stage], most)
    return DeviceCollective(shard, beside, ring)


class StageModel(DeviceModel):
    """A rank's decoder, which has the layers of one stage.

    Args:
        device: where its hidden states are.
    """

    def __init__(self, decoder: Decoder, collective: DeviceCollective, device: str) -> None:
        super().__init__(decoder, collective)
        assert collective.ring is not None, "there are several stages"
        self._ring: StageRing = collective.ring
        self._device = device
        self._untaken: deque[tuple[int, int]] = deque()  # passes of the first stage, and their outputs
        self._num_passes = 0

    def empty(self, num_rows: int) -> torch.Tensor:
        """Return memory for hidden states, [num_rows, hidden_size], in the model's dtype."""
        size, dtype = self._decoder.architecture.hidden_size, getattr(torch, self._decoder.dtype)
        return torch.empty(num_rows, size, dtype=dtype, device=self._device)

    def layers(
        self, batch: ForwardBatch, attention: AttentionBackend, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run this stage's layers; see `Decoder.forward`."""
        return self._decoder.forward(batch, attention, hidden)

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill memory with the hidden states that the stage before hands on, and return it."""
        return self._ring.receive(hidden)

    def hand_on(self, hidden: torch.Tensor) -> None:
        """Hand hidden states on: to the next stage, or outputs from the last one to the first."""
        self._ring.send(hidden.contiguous())

    def begin_pass(self, hidden: torch.Tensor, num_outputs: int) -> tuple[int, Callable[[], torch.Tensor]]:
        """Hand a pass on from the first stage; return its number, and what returns its outputs.

        Outputs come in the order of passes: those of earlier ones that nobody has asked for are dropped.
        """
        self._num_passes += 1
        self._untaken.append((self._num_passes, num_outputs))
        self.hand_on(hidden)
        return self._num_passes, partial(self._outputs_of, self._num_passes)

    def _outputs_of(self, number: int) -> torch.Tensor:
        while self._untaken:
            other, num_outputs = self._untaken.popleft()
            outputs = self.receive(self.empty(num_outputs))
            if other == number:
                return outputs
        raise AssertionError("the outputs of a pass are taken once, in the order of passes")
