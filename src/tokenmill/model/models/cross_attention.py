"""A layer whose tokens attend to those before them, and then to the clip of sound that their request begins with.

The keys and values of both lie in one memory: a clip's at the positions before `SelfAttentionSpec.first_key`, written
once, when the clip has been encoded; the text's behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenmill.model.architecture.architecture import LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.attention.protocol import AttentionLayer, ClipAttention
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.kv_places import KVPlace
from tokenmill.model.models.layer import Layer, ResidualStream
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.norm import make_norm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.collective import Collective
from tokenmill.model.sharding.shard import Part


class CrossAttention:
    """Attention of one layer to clips: queries of the text, keys and values of what an encoder has made.

    Attributes:
        layer: description for the backend: every token sees all of its clip.
    """

    __slots__ = ("_spec", "kv", "layer", "output", "query")

    def __init__(self, spec: SelfAttentionSpec, place: KVPlace, hidden_size: int, kernels: Kernels) -> None:
        q, kv = Part.whole(spec.q_size), Part.whole(spec.kv_size)
        self._spec = spec
        self.query = Linear(hidden_size, {"cross_q": q}, spec.qkv_bias, kernels)
        unbiased = () if spec.has_key_bias else ("cross_k",)
        self.kv = Linear(hidden_size, {"cross_k": kv, "cross_v": kv}, spec.qkv_bias, kernels, unbiased=unbiased)
        self.output = Linear(q, {"cross_output": Part.whole(hidden_size)}, spec.output_bias, kernels)
        self.layer = AttentionLayer(place.index, spec.scale, group=place.group, reads_only=True, ahead=None)

    def store(self, embeddings: torch.Tensor, slots: torch.Tensor, attention: ClipAttention) -> None:
        """Write the keys and values of positions of clips: embeddings [K, hidden_size], slots [K] int64."""
        k, v = self.kv.forward(embeddings).view(len(slots), 2, -1, self._spec.head_dim).unbind(1)
        attention.store(k, v, self.layer, slots)

    def forward(self, x: torch.Tensor, attention: ClipAttention, plan: Any) -> torch.Tensor:
        """Attend to clips: [T, hidden_size] -> [T, hidden_size]. `plan`: of a batch whose contexts are the clips."""
        return self.output.forward(attention.forward(self.query.forward(x), self.layer, plan))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        for linear in (self.query, self.kv, self.output):
            yield from linear.targets(scope)


class CrossLayer(Layer):
    """A layer with attention to clips between its attention and its feed-forward block; see `Layer`."""

    __slots__ = ("cross", "cross_norm")

    def __init__(
        self,
        spec: LayerSpec,
        place: KVPlace | int,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        super().__init__(spec, place, hidden_size, rotary, kernels, collective)
        assert isinstance(place, KVPlace) and spec.attention is not None, "clips are attended to besides the text"
        self.cross_norm = make_norm(hidden_size, spec.norm, kernels)
        self.cross = CrossAttention(spec.attention, place, hidden_size, kernels)

    def forward_text(self, stream: ResidualStream, attention: ClipAttention, plan: Any, across: Any) -> None:
        """Pass the stream of text tokens through the three blocks.

        Args:
            plan: of the tokens. across: of the same tokens, where their contexts are their clips.
        """
        assert self.attention is not None, "clips are attended to besides the text"
        mixed = self.attention.attend(stream.normed(self.attention_norm), attention, plan)
        stream.delta = self.attention.output.forward(mixed)
        stream.delta = self.cross.forward(stream.normed(self.cross_norm), attention, across)
        stream.delta = self.mlp.forward(stream.normed(self.mlp_norm))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this layer."""
        yield from super().targets(scope)
        yield from self.cross_norm.targets(scope, "cross_norm")
        yield from self.cross.targets(scope)
