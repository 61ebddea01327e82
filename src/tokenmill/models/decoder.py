"""The decoder: one class for every family, built from an `Architecture`, on any set of kernels.

Knows no files; `targets` says which checkpoint tensor goes where. Plain objects instead of `nn.Module`: there is
nothing to train, and a step on a CPU is short enough to feel a module's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.kernels.protocol import Kernels, LinearWeight, WeightRole
from tokenmill.kernels.torch_kernels import argmax, best
from tokenmill.models.architecture import Architecture
from tokenmill.models.layer import Layer, ResidualStream
from tokenmill.models.norm import RMSNorm
from tokenmill.models.rotary import all_rotary_tables
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import ALONE, Collective


class Decoder:
    """Embedding, layers, final norm and output head, with unfilled weights until a loader fills them.

    Of several ranks each has its part: `forward` they run together, `logits` and `best` are of a rank's own tokens.

    Attributes:
        tokens: which of the vocabulary are this rank's, in embedding and head.
        embedding: [tokens, hidden_size].
        head: [tokens, hidden_size]; the same matrix as `embedding` when they are tied.
        rotary: the tables of every kind of rope that a layer has.
    """

    __slots__ = ("architecture", "collective", "embedding", "final_norm", "head", "layers", "rotary", "tokens")

    def __init__(self, architecture: Architecture, kernels: Kernels, collective: Collective = ALONE) -> None:
        hidden_size = architecture.hidden_size
        self.architecture = architecture
        self.collective = collective
        self.tokens = collective.shard.part(architecture.vocab_size)
        self.embedding = kernels.linear_weight(self.tokens.count, hidden_size, WeightRole.EMBEDDING)
        self.final_norm = RMSNorm(hidden_size, architecture.norm_eps, kernels)
        self.rotary = all_rotary_tables(architecture, self.final_norm.weight)
        self.layers = [
            Layer(spec, index, hidden_size, self.rotary, kernels, collective)
            for index, spec in enumerate(architecture.layers)
        ]
        self.head: LinearWeight = self.embedding
        if not architecture.tie_embeddings:
            self.head = kernels.linear_weight(self.tokens.count, hidden_size, WeightRole.HEAD)

    @property
    def attention_spec(self) -> AttentionSpec:
        """What an attention backend must know of this model, as far as it is this rank's."""
        layers = [layer.attention.spec for layer in self.layers]
        shapes = {(one.num_heads, one.num_kv_heads, one.head_dim) for one in layers}
        assert len(shapes) == 1, "the layers of the KV memory have one shape"
        return AttentionSpec(len(layers), *shapes.pop())

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Run the batch's tokens, writing their KV.

        Returns:
            Final hidden states [S, hidden_size], normed, of the S >= 0 tokens at `batch.output_indices`: what `logits`
            and `argmax` take.
        """
        plan = attention.plan(batch)
        hidden = self._embed(batch.token_ids)
        if self.architecture.embedding_multiplier != 1:
            hidden.mul_(self.architecture.embedding_multiplier)
        media = None if batch.media is None else batch.media.embeddings
        if batch.media is not None and media is not None:
            hidden[batch.media.indices] = media[:, 0].to(hidden.dtype)
        stream = ResidualStream(hidden)
        adapted = [None if batch.adapters is None else batch.adapters.layer(i) for i in range(len(self.layers))]
        for index, (layer, own) in enumerate(zip(self.layers[:-1], adapted, strict=False), 1):
            layer.forward(stream, attention, plan, None, own)
            if batch.media is not None and media is not None and index < media.shape[1]:
                stream.hidden.index_add_(0, batch.media.indices, media[:, index].to(hidden.dtype))
        every = len(batch.output_indices) == len(batch.token_ids)
        self.layers[-1].forward(stream, attention, plan, None if every else batch.output_indices, adapted[-1])
        return stream.normed(self.final_norm)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size], memory of its own. Each rank brings the rows of its tokens."""
        if self.tokens.is_whole:
            return self.embedding.lookup(token_ids)
        is_own = (token_ids >= self.tokens.start) & (token_ids < self.tokens.stop)
        own = self.embedding.lookup(token_ids[is_own] - self.tokens.start)
        return self.collective.rows(own, is_own, len(token_ids)).clone()

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size], as `forward` returns them -> [S, tokens], see `LinearWeight.logits`."""
        logits = self.head.logits(outputs)
        return (
            logits if self.architecture.logits_scaling == 1 else logits.float().div_(self.architecture.logits_scaling)
        )

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """The most likely tokens, [S] int64, where nobody needs the logits themselves."""
        if self.architecture.logits_scaling == 1:
            return self.head.argmax(outputs)
        # A division rounds: two logits that differ may become equal, and then the lower id wins.
        return argmax(self.logits(outputs))

    def best(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely of this rank's tokens, [S] int64, and their logits, [S] float32; see `LinearWeight.best`."""
        if self.architecture.logits_scaling == 1:
            ids, values = self.head.best(outputs)
        else:
            ids, values = best(self.logits(outputs))
        return ids + self.tokens.start, values

    def targets(self) -> Iterator[Target]:
        """Every checkpoint tensor this model needs."""
        scope = TargetScope(self.architecture.weight_names)
        yield scope.matrix("embedding", self.embedding, 0, self.tokens)
        for index, layer in enumerate(self.layers):
            yield from layer.targets(TargetScope(scope.names, index))
        yield scope.vector("final_norm", self.final_norm.weight)
        if not self.architecture.tie_embeddings:
            yield scope.matrix("head", self.head, 0, self.tokens)
