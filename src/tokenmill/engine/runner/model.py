"""The interface of a model to the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend


class Model(Protocol):
    """A decoder on one device."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the final hidden states [S, hidden_size] of the batch's `output_indices`."""

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits: [S, hidden_size] -> [S, vocab_size] float32; on a GPU perhaps the model's dtype."""

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens: [S, hidden_size] -> [S] int64; -1 where logits are NaN or infinite."""


class PipelinedModel(Model, Protocol):
    """A decoder whose later layers run elsewhere, while this process goes on."""

    def begin_pass(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], torch.Tensor]:
        """Run the first layers; return a function that waits for the others and returns what `forward` does."""
