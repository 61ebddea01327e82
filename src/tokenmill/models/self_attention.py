"""The attention block of a layer: fused qkv, the backend's attention (norms of q and k, rotary, cache), output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend, AttentionLayer
from tokenmill.kernels.adapters import AdaptedLayer
from tokenmill.kernels.heads import HeadNorms, RotaryTables
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.architecture import RopeSpec, SelfAttentionSpec
from tokenmill.models.linear import Linear, second_linear
from tokenmill.models.rotary import rotated_order
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import Collective


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend.

    Args:
        index: of the layer.
        rotary: the tables of every kind of rope in the model.

    Attributes:
        spec: of the heads that are this rank's. heads: which of all query heads these are.
        layer: what the backend is told of this layer.
    """

    __slots__ = ("_collective", "heads", "layer", "output", "qkv", "spec")

    def __init__(
        self,
        spec: SelfAttentionSpec,
        index: int,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        shard, self._collective = collective.shard, collective
        self.spec = shard.attention(spec)
        self.heads, kv_heads = shard.heads(spec)
        q, kv = self.heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        self.qkv = Linear(hidden_size, {"q": q, "k": kv, "v": kv}, spec.qkv_bias, kernels)
        self.output = second_linear("output", q, hidden_size, spec.output_bias, kernels, collective)
        norms = None
        if spec.head_norm is not None:
            weights = kernels.vector(spec.head_dim), kernels.vector(spec.head_dim)
            norms = HeadNorms(*weights, spec.head_norm.eps, spec.head_norm.is_offset)
        tables = None if spec.rope is None else rotary[spec.rope]
        sinks = kernels.vector(self.heads.count) if spec.has_sinks else None
        self.layer = AttentionLayer(index, spec.scale, spec.window, norms, tables, sinks)

    def attend(
        self, x: torch.Tensor, attention: AttentionBackend, plan: Any, adapted: AdaptedLayer | None = None
    ) -> torch.Tensor:
        """[T, hidden] -> [T, q_size], as the output projection takes it; writes the tokens' k and v into the cache."""
        own = attention.forward(self.qkv.forward(x, adapted), self.layer, plan)
        return self._collective.between(own, self.heads.times(self.spec.head_dim))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        order = () if self.spec.rope is None else rotated_order(self.spec.rope, self.spec.head_dim)
        yield from self.qkv.targets(scope, {"q": order, "k": order})
        yield from self.output.targets(scope)
        if self.layer.sinks is not None:
            yield scope.vector("attention", self.layer.sinks, "sinks", self.heads)
        if self.layer.norms is not None:
            yield scope.vector("q_norm", self.layer.norms.q, order=order)
            yield scope.vector("k_norm", self.layer.norms.k, order=order)
