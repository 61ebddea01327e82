"""One layer: attention or a recurrence, then a feed-forward block, each behind a norm, added to its input.

Its output may go through a norm of its own, besides that before it (Gemma's "sandwich") or in its place (OLMo-2's); or
so may the sum (BERT's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.model.architecture.architecture import LayerSpec
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.architecture.recurrence_spec import DeltaNetSpec, ShortConvSpec, StateSpaceSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.kernels.operands import float32
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.delta_net import DeltaNet
from tokenmill.model.models.draft_inputs import Taps
from tokenmill.model.models.kv_places import KVPlace
from tokenmill.model.models.mamba import StateSpace
from tokenmill.model.models.mlp import MLP, PlainMLP
from tokenmill.model.models.moe import MoE
from tokenmill.model.models.norm import Norm, make_norm
from tokenmill.model.models.per_layer import PerLayerBlock
from tokenmill.model.models.self_attention import SelfAttention
from tokenmill.model.models.short_conv import ShortConv
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.collective import Collective

if TYPE_CHECKING:
    import torch

    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.kernels.adapters import AdaptedLayer
    from tokenmill.model.kernels.states import StepStates
    from tokenmill.platform.arrays import Array


class ResidualStream:
    """The hidden states of a pass: what blocks add to, and the last block's output, which the next norm adds.

    Attributes:
        hidden: [T, hidden_size].
        delta: [T, hidden_size] still to be added to it, times `scale`; or None.
        given: [layers, T, size], the layers' own embeddings; None: they have none.
        embeddings: [T, hidden_size], of the tokens behind the hidden states; None but in a draft head.
    """

    __slots__ = ("_taps", "delta", "embeddings", "given", "hidden", "scale")

    def __init__(
        self,
        hidden: torch.Tensor,
        given: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> None:
        self.hidden = hidden
        self.given = given
        self.embeddings = embeddings
        self._taps = taps
        self.delta: torch.Tensor | None = None
        self.scale = 1.0

    def normed(self, norm: Norm | None) -> torch.Tensor:
        """Add what is still to be added, and return the norm of the sum: one pass over memory for both.

        Without a norm return the sum itself, which must not be written to.
        """
        if norm is None:
            return self.hidden if self.delta is None else self.hidden.add_(self.delta, alpha=self.scale)
        return norm.forward(self.hidden, self.delta, self.scale)

    def renew(self, norm: Norm) -> None:
        """Let the norm of the sum take the place of the hidden states."""
        self.hidden, self.delta = self.normed(norm), None

    def pass_boundary(self) -> None:
        """Let the taps have what all layers so far have made, once it has been added up."""
        if self._taps is not None:
            self._taps.take(self.hidden)

    def keep(self, only: torch.Tensor) -> None:
        """Keep only these tokens."""
        self.hidden = self.hidden.index_select(0, only)
        self.given = None if self.given is None else self.given.index_select(1, only)


class Layer:
    """A decoder layer, built from its specification.

    Args:
        place: the place of its KV, or the index of its states if it has a recurrence.
        rotary: the tables of every kind of rope in the model.

    Attributes:
        attention: None: `recurrence` stands in its place.
        attention_last_norm: of the sum of `attention_out_norm` and the attention's input; None: absent.
        hidden_norm: of a layer that takes a pair, of the hidden states; `attention_norm` is then of the embeddings.
    """

    __slots__ = (
        "attention",
        "attention_last_norm",
        "attention_norm",
        "attention_out_norm",
        "hidden_norm",
        "mlp",
        "mlp_norm",
        "mlp_out_norm",
        "per_layer",
        "recurrence",
        "scalar",
        "spec",
    )

    def __init__(
        self,
        spec: LayerSpec,
        place: KVPlace | int,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        self.spec = spec
        norms_input = spec.has_in_norms and spec.norms_attention_input
        self.attention_norm = make_norm(hidden_size, spec.norm, kernels) if norms_input else None
        self.hidden_norm = make_norm(hidden_size, spec.norm, kernels) if spec.takes_pair else None
        self.attention: SelfAttention | None = None
        self.recurrence: ShortConv | DeltaNet | StateSpace | None = None
        if isinstance(place, KVPlace):
            assert spec.attention is not None, "a layer with KV has attention"
            self.attention = SelfAttention(spec.attention, place, hidden_size, rotary, kernels, collective)
        elif isinstance(spec.recurrence, ShortConvSpec):
            self.recurrence = ShortConv(spec.recurrence, place, hidden_size, kernels)
        elif isinstance(spec.recurrence, DeltaNetSpec):
            self.recurrence = DeltaNet(spec.recurrence, place, hidden_size, kernels)
        elif isinstance(spec.recurrence, StateSpaceSpec):
            self.recurrence = StateSpace(spec.recurrence, place, hidden_size, kernels)
        self.attention_out_norm = make_norm(hidden_size, spec.norm, kernels) if spec.has_out_norms else None
        self.attention_last_norm = make_norm(hidden_size, spec.norm, kernels) if spec.norms_attention_twice else None
        self.mlp_norm = make_norm(hidden_size, spec.norm, kernels) if spec.has_in_norms else None
        if isinstance(spec.mlp, MoeSpec):
            self.mlp: MLP | PlainMLP | MoE = MoE(spec.mlp, hidden_size, kernels, collective)
        else:
            block = MLP if spec.mlp.is_gated else PlainMLP
            self.mlp = block(spec.mlp, hidden_size, kernels, collective)
        self.mlp_out_norm = make_norm(hidden_size, spec.norm, kernels) if spec.has_out_norms else None
        self.scalar = kernels.vector(1) if spec.has_scalar else None
        self.per_layer: PerLayerBlock | None = None
        if spec.per_layer_size:
            assert isinstance(place, KVPlace), "layers with embeddings of their own have attention"
            self.per_layer = PerLayerBlock(place.layer, spec.per_layer_size, hidden_size, spec.norm, kernels)

    def forward(
        self,
        stream: ResidualStream,
        attention: AttentionBackend,
        plan: Any,
        only: torch.Tensor | None = None,
        adapted: AdaptedLayer | None = None,
        states: StepStates | None = None,
    ) -> None:
        """Pass the stream through this layer's two blocks.

        Args:
            only: [S] int64, the tokens that are wanted afterwards: the stream then holds just these, and once they
                have been attended to, nothing is computed for the others. None: all.
            adapted: which of the tokens have adapters; None: none has.
            states: of a model with recurrences.
        """
        normed = (
            stream.normed(self.attention_norm) if self.hidden_norm is None else self._pair(stream, self.hidden_norm)
        )
        stream.pass_boundary()
        if self.attention is not None:
            mixed = self.attention.attend(normed, attention, plan, adapted)
        else:
            assert self.recurrence is not None and states is not None, "a recurrence has states"
            mixed = self.recurrence.mix(normed, states)
        if only is not None:
            mixed = mixed.index_select(0, only)
            stream.keep(only)
            adapted = None if adapted is None else adapted.keep(only)
        stream.scale = self.spec.residual_multiplier
        if self.spec.norms_after:
            self._add_and_norm(stream, mixed, adapted)
        else:
            stream.delta = _through(self.attention_out_norm, self.mixer.output.forward(mixed, adapted))
            stream.delta = _through(self.mlp_out_norm, self._feed(stream, adapted))
        if self.scalar is not None:
            self._end(stream, self.scalar)

    def _feed(self, stream: ResidualStream, adapted: AdaptedLayer | None) -> torch.Tensor:
        """Return what the feed-forward block makes of the stream."""
        x = stream.normed(self.mlp_norm)
        if isinstance(self.mlp, MoE) and self.mlp.norms is not None:
            return self.mlp.forward_apart(x, stream.hidden, self.mlp.norms)
        return self.mlp.forward(x, adapted)

    def _add_and_norm(self, stream: ResidualStream, mixed: torch.Tensor, adapted: AdaptedLayer | None) -> None:
        """Let both blocks add to the hidden states, each time followed by the norm of the sum."""
        assert self.attention_out_norm is not None and self.mlp_out_norm is not None, "both sums are normed"
        given = None if self.attention_last_norm is None else stream.hidden.clone()
        stream.delta = self.mixer.output.forward(mixed, adapted)
        stream.renew(self.attention_out_norm)
        if self.attention_last_norm is not None:
            stream.delta = given
            stream.renew(self.attention_last_norm)
        stream.delta = self.mlp.forward(stream.hidden, adapted)
        stream.renew(self.mlp_out_norm)

    def _pair(self, stream: ResidualStream, hidden_norm: Norm) -> torch.Tensor:
        """Return the norm of the embeddings beside that of the hidden states: [T, 2 * hidden_size]."""
        assert stream.embeddings is not None and self.attention_norm is not None, "a draft head has both"
        normed, size = hidden_norm.forward(stream.hidden), stream.hidden.shape[1]
        pair = normed.new_empty(len(normed), 2 * size)
        pair[:, :size], pair[:, size:] = self.attention_norm.forward(stream.embeddings), normed
        if self.spec.begins_normed:
            stream.hidden = normed
        return pair

    @property
    def mixer(self) -> SelfAttention | ShortConv | DeltaNet | StateSpace:
        """The block that mixes the tokens of a request: attention or a recurrence."""
        mixer = self.attention or self.recurrence
        assert mixer is not None, "a layer has one"
        return mixer

    def _end(self, stream: ResidualStream, scalar: Array) -> None:
        """Apply the end of a Gemma 4 layer: a third block, then a factor on everything."""
        assert stream.delta is not None and stream.scale == 1, "a block has something to add"
        stream.hidden += stream.delta
        if self.per_layer is not None and stream.given is not None:
            stream.hidden += self.per_layer.forward(stream.hidden, stream.given)
        stream.hidden *= float(float32(scalar)[0]) if isinstance(scalar, np.ndarray) else scalar
        stream.delta = None

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this layer."""
        yield from _norm_targets(scope, "attention_norm", self.attention_norm)
        yield from _norm_targets(scope, "hidden_norm", self.hidden_norm)
        yield from self.mixer.targets(scope)
        yield from _norm_targets(scope, "attention_out_norm", self.attention_out_norm)
        yield from _norm_targets(scope, "attention_last_norm", self.attention_last_norm)
        yield from _norm_targets(scope, "mlp_norm", self.mlp_norm)
        yield from self.mlp.targets(scope)
        yield from _norm_targets(scope, "mlp_out_norm", self.mlp_out_norm)
        if self.per_layer is not None:
            yield from self.per_layer.targets(scope)
        if self.scalar is not None:
            yield scope.vector("layer", self.scalar, "layer_scalar")


def _through(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm.forward(x)


def _norm_targets(scope: TargetScope, role: str, norm: Norm | None) -> Iterator[Target]:
    if norm is not None:
        yield from norm.targets(scope, role)
