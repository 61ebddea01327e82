"""The interface of a model to the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

Hidden: TypeAlias = Any
"""Final hidden states, a row for each output, in a form that is the model's own: `len` counts the rows, an index array
picks some, and the heads take them."""


class Model(Protocol):
    """A decoder on one device."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Hidden:
        """Return the final hidden states [S, hidden_size] of the batch's `output_indices`."""

    def logits(self, outputs: Hidden) -> AnyArray:
        """Return logits: [S, hidden_size] -> [S, vocab_size] float32; on a GPU perhaps the model's dtype."""

    def argmax(self, outputs: Hidden) -> AnyArray:
        """Return the most likely tokens: [S, hidden_size] -> [S] int64; -1 where logits are NaN or infinite."""


class PipelinedModel(Model, Protocol):
    """A decoder whose later layers run elsewhere, while this process goes on."""

    def begin_pass(self, batch: ForwardBatch, attention: AttentionBackend) -> Callable[[], Hidden]:
        """Run the first layers; return a function that waits for the others and returns what `forward` does."""
