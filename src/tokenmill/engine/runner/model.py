"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend


class Model(Protocol):
    """A decoder on one device."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, hidden_size] of the batch's `output_indices`."""

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32; on a GPU perhaps the model's dtype."""

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S] int64, the largest of the logits; -1 where these are NaN or infinite."""


class PipelinedModel(Model, Protocol):
    """A decoder whose later layers run elsewhere, while this process goes on."""

    def begin(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], torch.Tensor]:
        """Run the first layers; returns what waits for the others and gives what `forward` does."""
