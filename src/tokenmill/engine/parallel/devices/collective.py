"""Combine the work of ranks on devices, in Megatron-LM's form: two sums a layer, and one row of logits put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.kernels.torch_kernels import argmax
from tokenmill.model.sharding.collective import Lookup, NativeRoom
from tokenmill.model.sharding.shard import Part, Shard
from tokenmill.platform.communicator import Communicator

if TYPE_CHECKING:
    from tokenmill.engine.parallel.devices.ring import StageRing
    from tokenmill.model.models.decoder import Decoder


class DeviceCollective:
    """Collective of ranks on devices. Every call is issued to the device and waits for nothing: a graph may hold it."""

    native: NativeRoom | None = None

    def __init__(self, shard: Shard, communicator: Communicator, ring: StageRing | None = None) -> None:
        """
        Args:
            communicator: of the ranks that share layers.
            ring: the ways to other stages; None: there is one stage.
        """
        assert shard.sums, "devices share no memory"
        self.shard = shard
        self.communicator = communicator
        self.ring = ring

    def abort(self) -> None:
        """Leave all other ranks."""
        self.communicator.abort()
        if self.ring is not None:
            self.ring.abort()

    def failure(self) -> Exception:
        """Return an AssertionError: ranks on devices do not meet in native code."""
        return AssertionError("ranks on devices do not meet in native code")

    def between(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the columns as they are: the second matrix takes this rank's part."""
        return own

    def behind(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the sum over all ranks."""
        return self.communicator.sum(own)

    def embeddings(self, token_ids: torch.Tensor, tokens: Part, lookup: Lookup) -> torch.Tensor:
        """Return embeddings summed over all ranks: each token's row is one rank's, and zeros with the others."""
        if tokens.is_whole:
            return lookup(token_ids)
        is_others = (token_ids < tokens.start) | (token_ids >= tokens.stop)
        own = lookup((token_ids - tokens.start).clamp(0, tokens.count - 1))
        return self.communicator.sum(own.masked_fill_(is_others.unsqueeze(1), 0))

    def rows(self, own: torch.Tensor, where: torch.Tensor | slice, count: int) -> torch.Tensor:
        """Refuse: no rank on a device has rows of its own."""
        raise AssertionError("no rank on a device has rows that others have not")

    def columns(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """Gather this rank's columns [S, part.count] into those of all ranks, [S, part.total]."""
        size = self.shard.size
        widest = -(-part.total // size)  # some ranks have one column less than others
        if part.count < widest:
            own = torch.nn.functional.pad(own, (0, widest - part.count))
        every = self.communicator.gather(own)
        if part.total % size == 0:
            return every.transpose(0, 1).reshape(len(own), part.total)
        counts = [Shard(rank, size).part(part.total).count for rank in range(size)]
        return torch.cat([columns[:, :count] for columns, count in zip(every, counts, strict=True)], 1)


class DeviceModel:
    """A rank's decoder, whose logits are gathered from all ranks."""

    def __init__(self, decoder: Decoder, collective: DeviceCollective) -> None:
        self._decoder = decoder
        self._collective = collective

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the final hidden states [S, hidden_size] of the batch's outputs."""
        return self._decoder.forward(batch, attention)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens, gathered from all ranks."""
        return self._collective.columns(self._decoder.logits(outputs), self._decoder.tokens)

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the tokens with the largest logits over all ranks."""
        return argmax(self.logits(outputs))
