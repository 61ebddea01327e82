"""One layer of a decoder: attention, then a feed-forward block, each after a norm and added to its input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Target
from tokenmill.models.mlp import MLP
from tokenmill.models.moe import MoE
from tokenmill.models.norm import RMSNorm
from tokenmill.models.self_attention import SelfAttention


class Stream:
    """The residual stream of a pass: what blocks add to, and the last block's output, which the next norm adds.

    Attributes:
        hidden: [T, hidden_size].
        update: [T, hidden_size] still to be added to it, or None.
    """

    __slots__ = ("hidden", "update")

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.update: torch.Tensor | None = None

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """Add what is still to be added, and the norm of the sum: one pass over memory for both."""
        return norm.forward(self.hidden, self.update)


class Layer:
    """Layer number `layer` of an architecture."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, architecture: Architecture, layer: int, kernels: Kernels) -> None:
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, kernels)
        self.attention = SelfAttention(architecture, layer, kernels)
        self.mlp_norm = RMSNorm(hidden, eps, kernels)
        self.mlp: MLP | MoE
        if architecture.moe is not None and architecture.is_sparse(layer):
            self.mlp = MoE(architecture.moe, hidden, kernels)
        else:
            self.mlp = MLP(architecture, kernels)

    def forward(self, stream: Stream, attention: AttentionBackend, plan: Any, only: torch.Tensor | None = None) -> None:
        """Pass the stream through this layer's two blocks.

        Args:
            only: [S] int64, the tokens that are wanted afterwards: the stream then holds just these, and once they
                have been attended to, nothing is computed for the others. None: all.
        """
        attended = self.attention.attend(stream.normed(self.attention_norm), attention, plan)
        if only is not None:
            attended, stream.hidden = attended.index_select(0, only), stream.hidden.index_select(0, only)
        stream.update = self.attention.output.forward(attended)
        stream.update = self.mlp.forward(stream.normed(self.mlp_norm))

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        yield from self.attention_norm.targets(f"{prefix}.input_layernorm")
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield from self.mlp_norm.targets(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}.mlp")
