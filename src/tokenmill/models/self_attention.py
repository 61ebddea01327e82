"""The attention block of a layer: fused qkv, norms of q and k, rotary embedding, cached attention, output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Empty, Linear, Target
from tokenmill.models.norm import RMSNorm
from tokenmill.models.rotary import CosSin, rotate


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend."""

    __slots__ = ("head_dim", "k_norm", "layer", "num_heads", "num_kv_heads", "output", "q_norm", "qkv", "window")

    def __init__(self, architecture: Architecture, layer: int, empty: Empty) -> None:
        self.layer = layer
        self.window = architecture.windows[layer]
        self.num_heads, self.num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self.head_dim = architecture.head_dim
        q_size, kv_size, hidden = architecture.q_size, architecture.kv_size, architecture.hidden_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(hidden, parts, architecture.qkv_bias, empty)
        self.output = Linear(q_size, {"o_proj": hidden}, architecture.output_bias, empty)
        self.q_norm = RMSNorm(self.head_dim, architecture.norm_eps, empty) if architecture.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, architecture.norm_eps, empty) if architecture.qk_norm else None

    def forward(self, x: torch.Tensor, cos_sin: CosSin, attention: AttentionBackend, plan: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; writes the tokens' k and v into the cache."""
        num_tokens, rotated = x.shape[0], self.num_heads + self.num_kv_heads
        qkv = self.qkv.forward(x).view(num_tokens, rotated + self.num_kv_heads, self.head_dim)
        v = qkv[:, rotated:]
        if self.q_norm is None or self.k_norm is None:
            # One rotation for q and k: their heads lie side by side.
            q, k = rotate(qkv[:, :rotated], cos_sin).split((self.num_heads, self.num_kv_heads), 1)
        else:
            q = rotate(self.q_norm.forward(qkv[:, : self.num_heads]), cos_sin)
            k = rotate(self.k_norm.forward(qkv[:, self.num_heads : rotated]), cos_sin)
        attended = attention.forward(q, k, v, self.layer, plan, self.window)
        return self.output.forward(attended.view(num_tokens, -1))

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.qkv.targets(prefix)
        yield from self.output.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(f"{prefix}.q_norm")
            yield from self.k_norm.targets(f"{prefix}.k_norm")
