"""The decoder: one class for every family, built from an `Architecture`.

Knows no files; `targets` says which checkpoint tensor goes where. Plain objects instead of `nn.Module`: there is
nothing to train, and a step on a CPU is short enough to feel a module's bookkeeping.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.models.architecture import Architecture
from tokenmill.models.layer import Layer
from tokenmill.models.linear import Target, product
from tokenmill.models.norm import RMSNorm
from tokenmill.models.rotary import Rotary


class Decoder:
    """Embedding, layers, final norm and output head, with uninitialized weights until a loader fills them.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [vocab_size, hidden_size]; the same tensor as `embedding` when they are tied.
    """

    __slots__ = ("architecture", "dtype", "embedding", "final_norm", "head", "layers", "rotary")

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: str) -> None:
        """Allocate everything. Device `meta` allocates nothing and serves to ask for `targets`."""
        empty = functools.partial(torch.empty, dtype=dtype, device=device)
        self.architecture = architecture
        self.dtype = dtype
        self.embedding = empty(architecture.vocab_size, architecture.hidden_size)
        self.layers = [Layer(architecture, layer, empty) for layer in range(architecture.num_layers)]
        self.final_norm = RMSNorm(architecture.hidden_size, architecture.norm_eps, empty)
        self.head = self.embedding if architecture.tie_embeddings else torch.empty_like(self.embedding)
        self.rotary = Rotary(architecture.rope, architecture.head_dim, architecture.max_position, dtype, device)

    @property
    def attention_spec(self) -> AttentionSpec:
        """What an attention backend must know of this model."""
        architecture = self.architecture
        return AttentionSpec(
            num_layers=architecture.num_layers,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            scale=architecture.head_dim**-0.5,
        )

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run the batch's tokens, writing their KV.

        Returns:
            Logits [S, vocab_size] float32 of the tokens at `batch.output_indices`, S of them, possibly 0.
        """
        plan = attention.plan(batch)
        cos_sin = self.rotary.lookup(batch.positions)
        hidden = functional.embedding(batch.token_ids, self.embedding)
        for layer in self.layers:
            hidden = layer.forward(hidden, cos_sin, attention, plan)
        outputs = self.final_norm.forward(hidden[batch.output_indices])
        return product(outputs, self.head).float()

    def targets(self) -> Iterator[Target]:
        """Every checkpoint tensor this model needs, by name, with the (view of a) parameter that takes its values."""
        yield "model.embed_tokens.weight", self.embedding
        for number, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{number}")
        yield from self.final_norm.targets("model.norm")
        if not self.architecture.tie_embeddings:
            yield "lm_head.weight", self.head
