"""One layer of a decoder: attention, then a feed-forward block, each after a norm and added to its input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Empty, Target
from tokenmill.models.mlp import MLP
from tokenmill.models.moe import MoE
from tokenmill.models.norm import RMSNorm
from tokenmill.models.rotary import CosSin
from tokenmill.models.self_attention import SelfAttention


class Layer:
    """Layer number `layer` of an architecture."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, architecture: Architecture, layer: int, empty: Empty) -> None:
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, empty)
        self.attention = SelfAttention(architecture, layer, empty)
        self.mlp_norm = RMSNorm(hidden, eps, empty)
        self.mlp: MLP | MoE
        if architecture.moe is not None and architecture.is_sparse(layer):
            self.mlp = MoE(architecture.moe, hidden, empty)
        else:
            self.mlp = MLP(architecture, empty)

    def forward(self, hidden: torch.Tensor, cos_sin: CosSin, attention: AttentionBackend, plan: Any) -> torch.Tensor:
        """Add this layer's two blocks to hidden [T, hidden_size], in place."""
        hidden += self.attention.forward(self.attention_norm.forward(hidden), cos_sin, attention, plan)
        hidden += self.mlp.forward(self.mlp_norm.forward(hidden))
        return hidden

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        yield from self.attention_norm.targets(f"{prefix}.input_layernorm")
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield from self.mlp_norm.targets(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}.mlp")
