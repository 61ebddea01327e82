"""One layer of a decoder: attention, then a feed-forward block, each after a norm and added to its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.kernels.adapters import AdaptedLayer
from tokenmill.kernels.heads import RotaryTables
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.architecture import LayerSpec, MoeSpec, RopeSpec
from tokenmill.models.mlp import MLP
from tokenmill.models.moe import MoE
from tokenmill.models.norm import RMSNorm
from tokenmill.models.self_attention import SelfAttention
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import Collective


class ResidualStream:
    """The hidden states of a pass: what blocks add to, and the last block's output, which the next norm adds.

    Attributes:
        hidden: [T, hidden_size].
        delta: [T, hidden_size] still to be added to it, times `scale`; or None.
    """

    __slots__ = ("delta", "hidden", "scale")

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.delta: torch.Tensor | None = None
        self.scale = 1.0

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """Add what is still to be added, and the norm of the sum: one pass over memory for both."""
        return norm.forward(self.hidden, self.delta, self.scale)


class Layer:
    """The layer that a specification describes.

    Args:
        index: of the layer.
        rotary: the tables of every kind of rope in the model.
    """

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm", "spec")

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        self.spec = spec
        self.attention_norm = RMSNorm(hidden_size, spec.norm_eps, kernels)
        self.attention = SelfAttention(spec.attention, index, hidden_size, rotary, kernels, collective)
        self.mlp_norm = RMSNorm(hidden_size, spec.norm_eps, kernels)
        if isinstance(spec.mlp, MoeSpec):
            self.mlp: MLP | MoE = MoE(spec.mlp, hidden_size, kernels, collective)
        else:
            self.mlp = MLP(spec.mlp, hidden_size, kernels, collective)

    def forward(
        self,
        stream: ResidualStream,
        attention: AttentionBackend,
        plan: Any,
        only: torch.Tensor | None = None,
        adapted: AdaptedLayer | None = None,
    ) -> None:
        """Pass the stream through this layer's two blocks.

        Args:
            only: [S] int64, the tokens that are wanted afterwards: the stream then holds just these, and once they
                have been attended to, nothing is computed for the others. None: all.
            adapted: which of the tokens have adapters; None: none has.
        """
        attended = self.attention.attend(stream.normed(self.attention_norm), attention, plan, adapted)
        if only is not None:
            attended, stream.hidden = attended.index_select(0, only), stream.hidden.index_select(0, only)
            adapted = None if adapted is None else adapted.keep(only)
        stream.scale = self.spec.residual_multiplier
        stream.delta = self.attention.output.forward(attended, adapted)
        stream.delta = self.mlp.forward(stream.normed(self.mlp_norm), adapted)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        yield scope.vector("attention_norm", self.attention_norm.weight)
        yield from self.attention.targets(scope)
        yield scope.vector("mlp_norm", self.mlp_norm.weight)
        yield from self.mlp.targets(scope)
