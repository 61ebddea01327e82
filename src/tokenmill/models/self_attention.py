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
from tokenmill.models.kv_places import KVPlace
from tokenmill.models.linear import Linear, second_linear
from tokenmill.models.rotary import rotated_order
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import Collective


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend.

    Args:
        place: of its KV.
        rotary: the tables of every kind of rope in the model.

    Attributes:
        spec: of the heads that are this rank's. heads: which of all query heads these are.
        layer: what the backend is told of this layer.
    """

    __slots__ = ("_collective", "heads", "layer", "output", "qkv", "spec")

    def __init__(
        self,
        spec: SelfAttentionSpec,
        place: KVPlace,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        shard, self._collective = collective.shard, collective
        self.spec = shard.attention(spec)
        self.heads, kv_heads = shard.heads(spec)
        q, kv = self.heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        parts = {"q": q} if place.reads_only else {"q": q, "k": kv, "v": kv}
        self.qkv = Linear(hidden_size, parts, spec.qkv_bias, kernels)
        self.output = second_linear("output", q, hidden_size, spec.output_bias, kernels, collective)
        norms = None
        if spec.head_norm is not None:
            of_q = kernels.vector(spec.head_dim)
            of_k = of_q if place.reads_only else kernels.vector(spec.head_dim)
            of_v = torch.ones_like(of_q) if spec.norms_values else None
            norms = HeadNorms(of_q, of_k, spec.head_norm.eps, spec.head_norm.is_offset, of_v)
        tables = None if spec.rope is None else rotary[spec.rope]
        sinks = kernels.vector(self.heads.count) if spec.has_sinks else None
        where = place.group, place.reads_only
        self.layer = AttentionLayer(place.index, spec.scale, spec.window, norms, tables, sinks, *where)

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
            if not self.layer.reads_only:
                yield scope.vector("k_norm", self.layer.norms.k, order=order)
