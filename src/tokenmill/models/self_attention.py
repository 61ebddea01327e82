"""The attention block of a layer: fused qkv, the backend's attention (norms of q and k, rotary, cache), output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.kernels.heads import HeadNorms
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Linear, Target, vector_target


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend."""

    __slots__ = ("layer", "norms", "output", "qkv", "window")

    def __init__(self, architecture: Architecture, layer: int, kernels: Kernels) -> None:
        self.layer = layer
        self.window = architecture.windows[layer]
        q_size, kv_size, hidden = architecture.q_size, architecture.kv_size, architecture.hidden_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(hidden, parts, architecture.qkv_bias, kernels)
        self.output = Linear(q_size, {"o_proj": hidden}, architecture.output_bias, kernels)
        self.norms: HeadNorms | None = None
        if architecture.qk_norm:
            head_dim = architecture.head_dim
            self.norms = HeadNorms(kernels.vector(head_dim), kernels.vector(head_dim), architecture.norm_eps)

    def attend(self, x: torch.Tensor, attention: AttentionBackend, plan: Any) -> torch.Tensor:
        """[T, hidden] -> [T, q_size], before the output projection; writes the tokens' k and v into the cache."""
        return attention.forward(self.qkv.forward(x), self.norms, self.layer, plan, self.window)

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.qkv.targets(prefix)
        yield from self.output.targets(prefix)
        if self.norms is not None:
            yield vector_target(f"{prefix}.q_norm.weight", self.norms.q)
            yield vector_target(f"{prefix}.k_norm.weight", self.norms.k)
