"""The attention block of a layer: fused qkv, the backend's attention (norms of q and k, rotary, cache), output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend, AttentionLayer
from tokenmill.kernels.heads import HeadNorms, RotaryTables
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.architecture import RopeSpec, SelfAttentionSpec
from tokenmill.models.linear import Linear
from tokenmill.models.targets import Target, TargetScope


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend.

    Args:
        index: of the layer.
        rotary: the tables of every kind of rope in the model.

    Attributes:
        layer: what the backend is told of this layer.
    """

    __slots__ = ("layer", "output", "qkv")

    def __init__(
        self,
        spec: SelfAttentionSpec,
        index: int,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
    ) -> None:
        parts = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
        self.qkv = Linear(hidden_size, parts, spec.qkv_bias, kernels)
        self.output = Linear(spec.q_size, {"output": hidden_size}, spec.output_bias, kernels)
        norms = None
        if spec.head_norm_eps is not None:
            norms = HeadNorms(kernels.vector(spec.head_dim), kernels.vector(spec.head_dim), spec.head_norm_eps)
        tables = None if spec.rope is None else rotary[spec.rope]
        self.layer = AttentionLayer(index, spec.scale, spec.window, norms, tables)

    def attend(self, x: torch.Tensor, attention: AttentionBackend, plan: Any) -> torch.Tensor:
        """[T, hidden] -> [T, q_size], before the output projection; writes the tokens' k and v into the cache."""
        return attention.forward(self.qkv.forward(x), self.layer, plan)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.qkv.targets(scope)
        yield from self.output.targets(scope)
        if self.layer.norms is not None:
            yield scope.vector("q_norm", self.layer.norms.q)
            yield scope.vector("k_norm", self.layer.norms.k)
