"""The decoder: one class for every family, built from an `Architecture`, on any set of kernels.

Knows no files; `targets` says which checkpoint tensor goes where. Plain objects instead of `nn.Module`: there is
nothing to train, and a step on a CPU is short enough to feel a module's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.kernels.protocol import Kernels, Matrix, MatrixRole
from tokenmill.models.architecture import Architecture
from tokenmill.models.layer import Layer, Stream
from tokenmill.models.linear import Target, matrix_target
from tokenmill.models.norm import RMSNorm
from tokenmill.models.rotary import rotary_tables


class Decoder:
    """Embedding, layers, final norm and output head, with unfilled weights until a loader fills them.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [vocab_size, hidden_size]; the same matrix as `embedding` when they are tied.
    """

    __slots__ = ("architecture", "embedding", "final_norm", "head", "layers", "rotary")

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        vocab_size, hidden_size = architecture.vocab_size, architecture.hidden_size
        self.architecture = architecture
        self.embedding = kernels.matrix(vocab_size, hidden_size, MatrixRole.EMBEDDING)
        self.layers = [Layer(architecture, layer, kernels) for layer in range(architecture.num_layers)]
        self.final_norm = RMSNorm(hidden_size, architecture.norm_eps, kernels)
        self.head: Matrix = self.embedding
        if not architecture.tie_embeddings:
            self.head = kernels.matrix(vocab_size, hidden_size, MatrixRole.HEAD)
        self.rotary = rotary_tables(
            architecture.rope, architecture.head_dim, architecture.max_position, self.final_norm.weight
        )

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
            Final hidden states [S, hidden_size], normed, of the S >= 0 tokens at `batch.output_indices`: what `logits`
            and `argmax` take.
        """
        plan = attention.plan(batch, self.rotary)
        stream = Stream(self.embedding.lookup(batch.token_ids))
        for layer in self.layers[:-1]:
            layer.forward(stream, attention, plan)
        every = len(batch.output_indices) == len(batch.token_ids)
        self.layers[-1].forward(stream, attention, plan, None if every else batch.output_indices)
        return stream.normed(self.final_norm)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size], as `forward` returns them -> [S, vocab_size] float32."""
        return self.head.logits(outputs)

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """The most likely tokens, [S] int64, where nobody needs the logits themselves."""
        return self.head.argmax(outputs)

    def targets(self) -> Iterator[Target]:
        """Every checkpoint tensor this model needs."""
        yield matrix_target("model.embed_tokens.weight", self.embedding)
        for number, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{number}")
        yield from self.final_norm.targets("model.norm")
        if not self.architecture.tie_embeddings:
            yield matrix_target("lm_head.weight", self.head)
