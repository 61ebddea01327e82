"""A decoder whose pass is one native call: the same kernels in the same order as `Decoder.forward`, in C++.

Between two kernels of a step Python takes longer than many a kernel, and takes the interpreter's lock each time, which
the engine's other threads want too. Where everything is native anyway, native/decoder.cpp goes from one to the next.
`native_pass_obstacle` refuses every specification that the native code does not serve.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.groups import GroupedAttention
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.tensor_batch import with_tensors
from tokenmill.model.kernels.adapters import AdapterRows
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.states import StateMemory
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.layer import Layer, native_obstacle
from tokenmill.model.models.mlp import MLP
from tokenmill.model.models.native_recurrence import NativeStates, bind_projection, bind_recurrence
from tokenmill.model.models.self_attention import SelfAttention
from tokenmill.platform.tensor_memory import Scratch

if TYPE_CHECKING:
    from tokenmill import _native

BF16_BYTES = 2
NATIVE_ATTENTION = "native"


class NativeDecoder:
    """A filled decoder bound to the KV memory of one attention. Its outputs have the bits of `Decoder.forward`'s.

    It holds addresses: the weights and the memory stay where they are.
    """

    __slots__ = ("_attention", "_decoder", "_native", "_room", "_scratch", "_states", "argmax", "best", "logits")

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention
        groups = native_groups(attention)
        assert groups is not None, "the attention is native"
        self._scratch = Scratch(torch.bfloat16, "cpu")
        self._native = _bind(decoder, groups)
        self._states: NativeStates | None = None
        self._room = decoder.collective.native
        if self._room is not None:
            first = decoder.layers[0].attention
            assert first is not None, "ranks share no recurrences"
            self._native.gather(self._room.ranks, self._room.address, decoder.tokens.start, first.heads.start)
        self.logits = decoder.logits
        self.argmax = decoder.argmax
        self.best = decoder.best

    def forward(
        self, batch: ForwardBatch, attention: AttentionBackend, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run `Decoder.forward` as one native call, with the attention that it is bound to. Of several ranks only the
        first has outputs: the others are told the input of the head."""
        assert attention is self._attention, "the pass is bound to the memory of one attention"
        batch = with_tensors(batch)  # until the cut
        token_ids, wanted = batch.token_ids, batch.output_indices
        assert token_ids.is_contiguous() and wanted.is_contiguous(), "ids and indices lie in one piece"
        if batch.adapters is not None and batch.adapters.change_embeddings:
            hidden = self._decoder.embed(token_ids, batch.adapters)
        given = None
        if self._decoder.per_layer is not None:
            hidden = self._decoder.embed(token_ids)
            given = self._decoder.per_layer.forward(token_ids, hidden).contiguous()
        assert hidden is None or hidden.is_contiguous(), "and so do hidden states"
        plan = self._attention.plan(batch)
        steps = [own.step for own in plan] if isinstance(plan, tuple) else [plan.step]
        tokens, outputs, shard = len(token_ids), len(wanted), self._decoder.shard
        if self._room is not None:
            assert self._native.shared_numbers(tokens) * BF16_BYTES <= self._room.num_bytes, "a larger step"
        scratch = self._scratch.take(self._native.scratch_numbers(tokens))
        rows = outputs if shard.is_last_stage else tokens
        out = torch.empty(rows, self._decoder.architecture.hidden_size, dtype=torch.bfloat16)
        inputs = (token_ids.data_ptr(), 0 if hidden is None else hidden.data_ptr(), tokens, wanted.data_ptr(), outputs)
        memory = (
            0 if given is None else given.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr() if shard.rank == 0 else 0,
        )
        states = None if batch.states is None else self._states_of(batch.states.memory).step(batch.states, tokens)
        assert states is not None or not self._decoder.architecture.recurrences, "recurrences have states"
        if not self._native.forward(steps, *inputs, *_adapted(batch.adapters), _media(batch), states, *memory):
            raise self._decoder.collective.failure()
        return out

    def _states_of(self, memory: StateMemory) -> NativeStates:
        """Return the bound states, made once: a model has one memory of states."""
        if self._states is None or self._states.memory is not memory:
            self._states = NativeStates(memory)
        return self._states


def _media(batch: ForwardBatch) -> _native.StepMedia:
    """Return the media embeddings that stand in the place of token embeddings."""
    native, media = importlib.import_module(MODULE), batch.media
    if media is None or media.embeddings is None:
        return native.StepMedia(0, 0, 0, 0)
    values, indices = media.embeddings, media.indices
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and indices.is_contiguous(), "as the pass reads it"
    return native.StepMedia(indices.data_ptr(), len(indices), values.data_ptr(), values.shape[1] - 1)


def _adapted(rows: AdapterRows | None) -> tuple[int, list[_native.Adapter]]:
    """Return the address of each token's adapter number, and the adapters in native form."""
    if rows is None:
        return 0, []
    assert rows.of_row.is_contiguous() and rows.of_row.dtype == torch.int32, "as the pass reads it"
    forms = [adapter.native for adapter in rows.adapters]
    return rows.of_row.data_ptr(), [form.native for form in forms if form is not None]


def native_pass_obstacle(decoder: Decoder, attention: str) -> str | None:
    """Return why the native pass cannot run this decoder with the attention of this name; None: it can."""
    if not isinstance(decoder.layers[0].mixer.output.weight, PackedWeight):
        return "the weights are not packed for native kernels"
    if attention != NATIVE_ATTENTION:
        return "the attention is not native"
    return next(filter(None, map(native_obstacle, decoder.architecture.layers)), None)


def in_one_call(decoder: Decoder, attention: AttentionBackend) -> Decoder | NativeDecoder:
    """Return the decoder with each pass in one native call if nothing prevents that, else as it is."""
    if native_groups(attention) is None or native_pass_obstacle(decoder, NATIVE_ATTENTION) is not None:
        return decoder
    return NativeDecoder(decoder, attention)


def native_groups(attention: AttentionBackend) -> list[NativeAttention] | None:
    """Return the native attention of each group of layers; None: another one serves."""
    backends = attention.backends if isinstance(attention, GroupedAttention) else (attention,)
    groups = [backend for backend in backends if isinstance(backend, NativeAttention)]
    return groups if len(groups) == len(backends) else None


def _bind(decoder: Decoder, groups: list[NativeAttention]) -> _native.Decoder:
    native = importlib.import_module(MODULE)
    norm, architecture = decoder.final_norm, decoder.architecture
    own = norm.spec.eps, norm.spec.is_offset
    attentions = [group.attention for group in groups]
    bound: _native.Decoder = native.Decoder(attentions, architecture.hidden_size, *own)
    if decoder.embedding is not None:
        assert isinstance(decoder.embedding, PackedWeight), "its matrices are packed"
        bound.begin(decoder.embedding.packed, decoder.embedding_multiplier)
    if decoder.shard.is_last_stage:
        bound.end(norm.weight.data_ptr())
    for layer in decoder.layers:
        bound.add(_bind_layer(native, layer, groups))
    return bound


def _bind_layer(native: Any, layer: Layer, groups: list[NativeAttention]) -> _native.DecoderLayer:
    own, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP), "its layers are dense"
    norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
    bound: _native.DecoderLayer = native.DecoderLayer(
        norms=native.LayerNorms(*(0 if norm is None else norm.weight.data_ptr() for norm in norms)),
        attention=None if own is None else _bind_attention(native, own, groups[own.layer.group]),
        recurrence=None if layer.recurrence is None else bind_recurrence(layer.recurrence),
        output=bind_projection(layer.mixer.output, layer.mixer.output.columns.start),
        gate_up=bind_projection(mlp.gate_up, mlp.gate_up.columns.start),
        down=bind_projection(mlp.down, mlp.down.columns.start),
        gate=mlp.gate,
        residual_multiplier=layer.spec.residual_multiplier,
        end=_bind_end(native, layer),
    )
    return bound


def _bind_attention(native: Any, own: SelfAttention, group: NativeAttention) -> _native.DecoderAttention:
    gate = None if own.gate is None else bind_projection(own.gate)
    bound: _native.DecoderAttention = native.DecoderAttention(
        group=own.layer.group, qkv=bind_projection(own.qkv), layer=group.bound(own.layer), gate=gate
    )
    return bound


def _bind_end(native: Any, layer: Layer) -> _native.LayerEnd:
    end: _native.LayerEnd = native.LayerEnd()
    if layer.scalar is not None:
        end.multiply(layer.scalar.data_ptr())
    if (third := layer.per_layer) is not None:
        end.gate(bind_projection(third.gate), bind_projection(third.output), third.norm.weight.data_ptr())
    return end
