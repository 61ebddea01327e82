"""The decoder: one class for every family, built from an `Architecture`, on any set of kernels.

Knows no files; `targets` says which checkpoint tensor goes where. Plain objects instead of `nn.Module`: there is
nothing to train, and a step on a CPU is short enough to feel a module's bookkeeping.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.kernels.operands import rounded
from tokenmill.model.kernels.protocol import Kernels, LinearWeight, WeightRole
from tokenmill.model.kernels.states import KeptInputs, StateMemory, StateRows
from tokenmill.model.models.draft_inputs import DraftInputs, PairInputs, Taps, outputs_of_all
from tokenmill.model.models.kv_places import KVPlace, kv_groups, kv_places
from tokenmill.model.models.layer import Layer, ResidualStream
from tokenmill.model.models.norm import Norm, make_norm
from tokenmill.model.models.per_layer import PerLayerInputs
from tokenmill.model.models.rotary import all_rotary_tables
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.models.text_inputs import TextInputs
from tokenmill.model.sharding.collective import ALONE, Collective
from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    import torch

    from tokenmill.model.attention.batch import ForwardBatch
    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.kernels.adapters import AdaptedLayer, AdapterRows
    from tokenmill.platform.arrays import Array


class Decoder:
    """Embedding, layers, final norm and output head, with unfilled weights until a loader fills them.

    Each of several ranks has its part: ranks run `forward` together, while `logits` and `best` are of a rank's own
    tokens. Of several stages the first has the embedding and the head, and the last has the final norm.

    Attributes:
        tokens: this rank's part of the vocabulary, in embedding and head.
        embedding: [tokens, hidden_size]; None: another stage's.
        head: [tokens, hidden_size]; the same matrix as `embedding` when they are tied; None: absent, or elsewhere.
        inputs: what an encoder adds to the embeddings; None: nothing. final_norm: None: absent.
        boundaries: of its passes, where `ForwardBatch.taps` are taken; see `Taps`.
        draft_inputs: what turns its target's taps into its input; None: it is no draft head.
        rotary: the tables of every kind of rope that a layer has.
    """

    __slots__ = (
        "_kernels",
        "architecture",
        "boundaries",
        "collective",
        "draft_inputs",
        "embedding",
        "final_norm",
        "head",
        "inputs",
        "layers",
        "per_layer",
        "rotary",
        "shard",
        "tokens",
    )

    def __init__(self, architecture: Architecture, kernels: Kernels, collective: Collective = ALONE) -> None:
        hidden_size = architecture.hidden_size
        self.architecture = architecture
        self.collective = collective
        self.shard = collective.shard
        self._kernels = kernels
        self.boundaries: tuple[int, ...] = ()
        self.tokens = self.shard.part(architecture.vocab_size)
        self.embedding: LinearWeight | None = None
        draft = architecture.draft_head
        if self.shard.is_first_stage and (draft is None or draft.has_embedding):
            self.embedding = kernels.linear_weight(self.tokens.count, hidden_size, WeightRole.EMBEDDING)
        self.inputs = None if architecture.inputs is None else TextInputs(architecture.inputs, hidden_size, kernels)
        self.final_norm: Norm | None = None
        if architecture.has_final_norm:
            self.final_norm = make_norm(hidden_size, architecture.norm, kernels)
        self.rotary = all_rotary_tables(architecture, kernels)
        own = self.shard.layers(architecture)
        places = kv_places([architecture.layers[index].attention for index in own])
        numbers = itertools.count()  # of the layers with states
        self.layers = [
            self._layer(index, next(numbers) if place is None else place, kernels)
            for index, place in zip(own, places, strict=True)
        ]
        spec = architecture.per_layer
        self.per_layer = None if spec is None else PerLayerInputs(architecture, spec, kernels)
        self.draft_inputs: DraftInputs | PairInputs | None = None
        self.head = self.embedding if architecture.has_head else None
        if draft is not None:
            self.draft_inputs = (
                PairInputs(hidden_size, architecture.norm, kernels)
                if draft.projects_pairs
                else DraftInputs(draft, hidden_size, architecture.norm, kernels)
            )
            self.head = (
                kernels.linear_weight(draft.vocab_size, hidden_size, WeightRole.HEAD) if draft.has_head else None
            )
            self.boundaries = (len(self.layers),)
        elif self.shard.is_first_stage and architecture.has_head and not architecture.tie_embeddings:
            self.head = kernels.linear_weight(self.tokens.count, hidden_size, WeightRole.HEAD)

    def _layer(self, index: int, place: KVPlace | int, kernels: Kernels) -> Layer:
        """Make the model's layer `index`."""
        architecture, own = self.architecture, kernels.of_layer(index)
        return Layer(architecture.layers[index], place, architecture.hidden_size, self.rotary, own, self.collective)

    @property
    def dtype(self) -> str:
        """Name of the dtype of its hidden states."""
        return self._kernels.dtype

    @property
    def attention_spec(self) -> AttentionSpec:
        """Description of this rank's attention layers for an attention backend."""
        layers = [layer.attention.spec for layer in self.layers if layer.attention is not None]
        has_sinks = any(layer.has_sinks for layer in layers)
        sees_spans = self.architecture.spans_see_ahead
        groups = (
            AttentionSpec(count, *kind[:3], has_sinks, kind[3], spans_see_ahead=sees_spans and kind[4])
            for kind, count in kv_groups(layers).items()
        )
        sights = {
            "sees_ahead": not self.architecture.needs_kv,
            "has_clips": self.architecture.clip_length > 0,
            "has_alibi": any(layer.has_alibi for layer in layers),
        }
        first, *others = (msgspec.structs.replace(one, **sights) for one in groups)
        return msgspec.structs.replace(first, others=tuple(others))

    def state_memory(self, num_slots: int, arrays: ArrayLibrary) -> StateMemory:
        """Make memory for the states of its layers, in `num_slots` slots, of a device's arrays."""
        dtypes = self._kernels.dtype, "float32"
        specs = self.architecture.recurrences
        layers = [[(part.shape, dtypes[part.is_wide]) for part in one.state] for one in specs]
        return StateMemory(layers, num_slots, arrays, ([one.inputs for one in specs], self._kernels.dtype))

    def replay(self, memory: StateMemory, inputs: KeptInputs, rows: StateRows) -> None:
        """Advance states by draft tokens that turned out to be right; `rows` counts them among those of `inputs`."""
        recurrences = [layer.recurrence for layer in self.layers if layer.recurrence is not None]
        for own, kept, state in zip(recurrences, inputs.layers, memory.layers, strict=True):
            own.replay(kept, state, rows)

    def forward(
        self, batch: ForwardBatch, attention: AttentionBackend, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the batch's tokens, writing their KV.

        Args:
            hidden: [T, hidden_size], from the stage before this one or of a draft head, in memory that this one may
                write to; None: this is the first.

        Returns:
            Final hidden states [S, hidden_size], normed, of the S >= 0 tokens at `batch.output_indices`: what `logits`
            and `argmax` take. Of a stage before the last: the hidden states of all tokens, [T, hidden_size].
        """
        if batch.taps is not None and self.is_tapped_behind:
            every = batch.token_ids.new_ones(len(batch.token_ids)).cumsum(0) - 1
            return outputs_of_all(lambda own: self.forward(own, attention), batch, batch.taps, every)
        plan = attention.plan(batch)
        hidden = self.joined(batch.token_ids, hidden)
        embeddings = self.embed(batch.token_ids) if isinstance(self.draft_inputs, DraftInputs) else None
        hidden = self.embed(batch.token_ids, batch.adapters) if hidden is None else hidden
        hidden = hidden if self.inputs is None else self.inputs.forward(hidden, batch)
        media = None if batch.media is None else batch.media.embeddings
        if batch.media is not None and media is not None:
            hidden[batch.media.indices] = media[:, 0].to(hidden.dtype)
        given = None if self.per_layer is None else self.per_layer.forward(batch.token_ids, hidden)
        taps = None if batch.taps is None else Taps(self.boundaries, batch.taps)
        stream = ResidualStream(hidden, given, embeddings, taps)
        adapted: Sequence[AdaptedLayer | None] = [None] * len(self.layers)
        if batch.adapters is not None:
            adapted = batch.adapters.layers(len(self.layers))
        for index, (layer, own) in enumerate(zip(self.layers[:-1], adapted, strict=False), 1):
            layer.forward(stream, attention, plan, None, own, batch.states)
            if batch.media is not None and media is not None and index < media.shape[1]:
                stream.hidden.index_add_(0, batch.media.indices, media[:, index].to(stream.hidden.dtype))
        every = not self.shard.is_last_stage or len(batch.output_indices) == len(batch.token_ids)
        only = None if every else batch.output_indices
        self.layers[-1].forward(stream, attention, plan, only, adapted[-1], batch.states)
        normed = stream.normed(self.final_norm)
        stream.pass_boundary()
        return normed if self.shard.is_last_stage else stream.hidden

    def embed(self, token_ids: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Embed token ids: [T] int64 -> [T, hidden_size], memory of its own."""
        assert self.embedding is not None, "the first stage begins"
        hidden = self.collective.embeddings(token_ids, self.tokens, self.embedding.lookup)
        if adapters is not None:
            adapters.add_embeddings(token_ids, hidden)
        multiplier = self.embedding_multiplier
        return hidden if multiplier == 1 else self._kernels.scaled_sum(hidden, multiplier)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Return what a draft head takes for tokens: its target's taps [T, taps, size] -> [T, hidden_size]."""
        assert self.draft_inputs is not None, "a draft head has a target"
        return self.draft_inputs.forward(taps)

    def joined(self, token_ids: Array, hidden: Any) -> Any:
        """Return what the first layer takes: of an MTP layer a vector of each hidden state and the token behind it."""
        if not isinstance(self.draft_inputs, PairInputs):
            return hidden
        return self.draft_inputs.join(self.embed(cast("torch.Tensor", token_ids)), hidden)

    @property
    def is_tapped_behind(self) -> bool:
        """True if its taps are its outputs, of all tokens."""
        return self.draft_inputs is None and self.boundaries == (len(self.layers),)

    def borrow(self, target: Decoder) -> None:
        """Take the embedding and the output head of the target where this draft head has none."""
        draft = self.architecture.draft_head
        assert draft is not None, "a draft head has a target"
        self.embedding = self.embedding if draft.has_embedding else target.embedding
        self.head = self.head if draft.has_head else target.head

    @property
    def embedding_multiplier(self) -> float:
        """Factor on the embeddings, rounded to the kernels' dtype where the architecture asks for it."""
        exact = self.architecture.embedding_multiplier
        return rounded(exact, self._kernels.dtype) if self.architecture.rounds_multiplier else exact

    @property
    def _head(self) -> LinearWeight:
        assert self.head is not None, "the first stage of a model that gives logits has the head"
        return self.head

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, tokens] of [S, hidden_size] from `forward`; see `LinearWeight.logits`."""
        logits, architecture = self._head.logits(outputs), self.architecture
        if architecture.logits_scaling != 1:
            logits = logits.float().div_(architecture.logits_scaling)
        return logits if architecture.logits_cap is None else _capped(logits.float(), architecture.logits_cap)

    @property
    def _keeps_logits(self) -> bool:
        """True if the head's outputs are the logits, neither scaled nor capped."""
        return self.architecture.logits_scaling == 1 and self.architecture.logits_cap is None

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens, [S] int64, for rows that do not need the logits themselves."""
        if self._keeps_logits:
            return self._head.argmax(outputs)
        from tokenmill.model.kernels.torch_kernels import argmax

        # A division and a bend round: two logits that differ may become equal, and then the lower id wins.
        return argmax(self.logits(outputs))

    def best(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's most likely tokens, [S] int64, and their logits, [S] float32; see `LinearWeight.best`."""
        if self._keeps_logits:
            ids, values = self._head.best(outputs)
        else:
            from tokenmill.model.kernels.torch_kernels import best

            ids, values = best(self.logits(outputs))
        return ids + self.tokens.start, values

    def targets(self) -> Iterator[Target]:
        """Yield every checkpoint tensor that this model needs; nothing is wanted of those of other stages."""
        scope, shape = TargetScope(self.architecture.weight_names), (self.tokens.total, self.architecture.hidden_size)
        draft = self.architecture.draft_head
        for role, matrix in {"embedding": self.embedding, "head": self.head}.items():
            if role == "head" and (self.architecture.tie_embeddings or not self.architecture.has_head):
                continue
            if draft is not None:
                if draft.has_embedding if role == "embedding" else draft.has_head:
                    assert matrix is not None, "it has its own"
                    yield scope.matrix(role, matrix)
                continue
            own = None if matrix is None else scope.matrix(role, matrix, 0, self.tokens)
            yield own or scope.elsewhere(role, shape)
        own_layers, empty = self.shard.layers(self.architecture), self._kernels.without_memory()
        for index in range(len(self.architecture.layers)):
            of_layer = TargetScope(scope.names, index)
            if index in own_layers:
                yield from self.layers[index - own_layers.start].targets(of_layer)
            else:
                yield from (
                    target.unwanted() for target in self._layer(index, KVPlace(index, 0, 0), empty).targets(of_layer)
                )
        if self.per_layer is not None and self.architecture.per_layer is not None:
            yield from self.per_layer.targets(scope, self.architecture.per_layer)
        if self.draft_inputs is not None:
            yield from self.draft_inputs.targets(scope)
        if self.inputs is not None:
            yield from self.inputs.targets(scope)
        for norm in () if self.final_norm is None else self.final_norm.targets(scope, "final_norm"):
            yield norm if self.shard.is_last_stage else norm.unwanted()


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(logits / cap), in place.

    On a CPU by numpy, whose tanh of a number does not depend on its place in a row; on a GPU no number's does.
    """
    logits.div_(cap)
    if logits.device.type == "cpu":
        np.tanh(logits.numpy(), out=logits.numpy())
    else:
        logits.tanh_()
    return logits.mul_(cap)
