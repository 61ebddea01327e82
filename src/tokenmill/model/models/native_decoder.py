"""A decoder whose pass is one native call: the same kernels in the same order as `Decoder.forward`, in C++.

Between two kernels of a step Python takes longer than many a kernel, and takes the interpreter's lock each time, which
the engine's other threads want too. Where everything is native anyway, native/decoder.h goes from one to the next.
Arrays are NumPy's, bfloat16 as its bits. Knows no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.context import own_rows, shares_rows
from tokenmill.model.attention.groups import GroupedAttention
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.operands import in_one_piece, is_a
from tokenmill.model.models.draft_inputs import outputs_of_all
from tokenmill.model.models.moe import MoE
from tokenmill.model.models.native_layers import bind_inputs, bind_layer, bind_norm
from tokenmill.model.models.native_projection import address_of
from tokenmill.model.models.native_recurrence import NativeStates
from tokenmill.model.models.text_inputs import position_rows
from tokenmill.platform.arrays import address
from tokenmill.platform.memory import zeroed_bytes

if TYPE_CHECKING:
    import torch

    from tokenmill import _native
    from tokenmill.model.architecture.architecture import Architecture
    from tokenmill.model.attention.batch import ForwardBatch, MediaTokens
    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.kernels.adapters import Adapter, AdapterRows
    from tokenmill.model.kernels.protocol import LinearWeight
    from tokenmill.model.kernels.states import StateMemory
    from tokenmill.model.models.decoder import Decoder
    from tokenmill.platform.arrays import Array

BF16_BYTES = 2
NATIVE_ATTENTION = "native"
HEAD_MULTIPLE, MOST_HEAD_DIM = 16, 512
MOST_KEPT_LOGITS = 64 << 20  # bytes: 64 rows of 262,144 tokens

Bits = npt.NDArray[np.uint16]
"""Numbers in bfloat16."""


class NativeDecoder:
    """A filled decoder bound to the KV memory of one attention. Its outputs have the bits of `Decoder.forward`'s.

    It holds addresses: the weights and the memory stay where they are.
    """

    __slots__ = (
        "_attention",
        "_decoder",
        "_dtype",
        "_groups",
        "_logits",
        "_native",
        "_room",
        "_scratch",
        "_states",
        "_table",
    )

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention
        groups = native_groups(attention)
        assert groups is not None, "the attention is native"
        self._scratch, self._logits = _Scratch(), _Logits()
        self._groups = groups
        self._native = _bind(decoder, groups)
        self._dtype = np.float32 if decoder.dtype == "float32" else np.uint16
        self._table: object = None
        self._states: NativeStates | None = None
        self._room = decoder.collective.native
        if self._room is not None:
            first = decoder.layers[0].attention
            assert first is not None, "ranks share no recurrences"
            self._native.gather(self._room.ranks, self._room.address, decoder.tokens.start, first.heads.start)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, hidden: Array | None = None) -> Any:
        """Run `Decoder.forward` as one native call, with the attention that it is bound to.

        Of several ranks only the first has outputs: the others are told the input of the head.

        Args:
            batch: of NumPy arrays.
            hidden: [T, hidden_size] bfloat16, from the stage before this one or of a draft head; None: absent.

        Returns:
            [S, hidden_size] bfloat16, as its bits, or float32.
        """
        assert attention is self._attention, "the pass is bound to the memory of one attention"
        if batch.taps is not None and self._decoder.is_tapped_behind:
            every = np.arange(len(batch.token_ids))
            return outputs_of_all(lambda own: self.forward(own, attention), batch, batch.taps, every)
        ranks = self._groups[0].ranks
        if ranks is None or not shares_rows(batch, ranks):
            return self._run(batch, hidden)
        own, places = own_rows(batch, ranks.rank, ranks.size)
        return ranks.rows(self._run(own, hidden), places, len(batch.output_indices)).copy()

    def _run(self, batch: ForwardBatch, hidden: Array | None) -> Any:
        hidden = self._decoder.joined(batch.token_ids, hidden)
        tokens, outputs, shard = len(batch.token_ids), len(batch.output_indices), self._decoder.shard
        plan = self._attention.plan(batch)
        steps = [own.step for own in plan] if isinstance(plan, tuple) else [plan.step]
        self._bind_table()
        if self._room is not None:
            assert self._native.shared_numbers(tokens) * BF16_BYTES <= self._room.num_bytes, "a larger step"
        rows_out = outputs if shard.is_last_stage else tokens
        out = np.empty((rows_out, self._decoder.architecture.hidden_size), self._dtype)
        rows = self._position_rows(batch)
        begins = _begin(batch.token_ids), _begin(hidden), _begin(rows), _begin(batch.types)
        inputs = (*begins, tokens, _begin(batch.output_indices), outputs)
        states = None if batch.states is None else self._states_of(batch.states.memory).step(batch.states, tokens)
        assert states is not None or not self._decoder.architecture.recurrences, "recurrences have states"
        more = (*_adapters(batch.adapters), _media(batch.media), states, _begin(batch.taps))
        scratch = self._scratch.take(self._native.scratch_numbers(tokens))
        if not self._native.forward(steps, *inputs, *more, scratch, address(out) if shard.rank == 0 else 0):
            raise self._decoder.collective.failure()
        for group in self._groups:
            group.check()
        return out

    def fuse(self, taps: Array) -> Any:
        """Return what a draft head takes for tokens, [T, hidden_size] bfloat16, as its bits."""
        # Written for tensors, which these kernels take arrays in place of.
        return self._decoder.fuse(cast("torch.Tensor", taps))

    def logits(self, outputs: Array) -> npt.NDArray[np.float32]:
        """Return the logits of this rank's tokens, [S, tokens] float32."""
        head, architecture = self._head, self._decoder.architecture
        logits = self._logits.take(len(outputs), head.shape[0])
        self._native.logits(head.packed, _begin(outputs), len(outputs), address(logits))
        if architecture.logits_scaling != 1:
            logits /= np.float32(architecture.logits_scaling)
        if (cap := architecture.logits_cap) is not None:
            logits /= np.float32(cap)
            np.tanh(logits, out=logits)
            logits *= np.float32(cap)
        return logits

    def argmax(self, outputs: Array) -> npt.NDArray[np.int64]:
        """Return the most likely of this rank's tokens, [S] int64; -1 where logits are NaN or infinite."""
        ids, values = self._best(outputs)
        return np.where(np.isfinite(values), ids, -1)

    def best(self, outputs: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the most likely of this rank's tokens, [S] int64, and their logits, [S] float32."""
        ids, values = self._best(outputs)
        return ids + self._decoder.tokens.start, values

    def _best(self, outputs: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        architecture = self._decoder.architecture
        if architecture.logits_scaling == 1 and architecture.logits_cap is None:
            ids, values = np.empty(len(outputs), np.int64), np.empty(len(outputs), np.float32)
            self._native.best(self._head.packed, _begin(outputs), len(outputs), address(ids), address(values))
            return ids, values
        # A division and a bend round: two logits that differ may become equal, and then the lower id wins.
        logits = self.logits(outputs)
        ids = logits.argmax(-1)
        return ids, np.take_along_axis(logits, ids[:, None], 1)[:, 0]

    @property
    def _head(self) -> PackedWeight:
        head = self._decoder.head
        assert isinstance(head, PackedWeight), "the first stage has the head"
        return head

    def _position_rows(self, batch: ForwardBatch) -> Array | None:
        """Return the rows of learned positions, [T] int64; None: there is no table of them."""
        inputs = self._decoder.inputs
        positions = None if inputs is None else inputs.spec.positions
        return None if positions is None else position_rows(positions, batch)

    def _bind_table(self) -> None:
        """Bind the inputs that layers have of their own, whose table may have been mapped anew."""
        inputs = self._decoder.per_layer
        if inputs is not None and inputs.table is not self._table:
            bind_inputs(self._native, inputs, self._decoder.architecture)
            self._table = inputs.table

    def _states_of(self, memory: StateMemory) -> NativeStates:
        """Return the bound states, made once: a model has one memory of states."""
        if self._states is None or self._states.memory is not memory:
            self._states = NativeStates(memory)
        return self._states


class _Scratch:
    """Memory of a pass, kept mapped for the next one."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = zeroed_bytes(1)

    def take(self, count: int) -> int:
        """Return where `count` numbers of bfloat16 have room, until the next call; grow to the largest asked for."""
        if count * BF16_BYTES > len(self._memory):
            self._memory = zeroed_bytes(count * BF16_BYTES)
        return address(self._memory)


class _Logits:
    """Memory of logits, kept mapped for the next step: to map and unmap tens of MB takes longer than the rest of it."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = zeroed_bytes(1)

    def take(self, rows: int, tokens: int) -> npt.NDArray[np.float32]:
        """Return [rows, tokens] to write to. Logits that something still refers to stay as they are."""
        size = rows * tokens * np.dtype(np.float32).itemsize
        if size > MOST_KEPT_LOGITS:
            return np.empty((rows, tokens), np.float32)
        # Referred to here and by the call; each view of logits refers to it too.
        if size > len(self._memory) or sys.getrefcount(self._memory) > 2:
            self._memory = zeroed_bytes(size)
        return self._memory[:size].view(np.float32).reshape(rows, tokens)


def _begin(array: Array | None) -> int:
    """Return where an array in one piece begins; 0: it is absent."""
    assert array is None or in_one_piece(array), "arrays lie in one piece"
    return address_of(array)


def _adapters(rows: AdapterRows | None) -> tuple[int, list[_native.Adapter]]:
    """Return the address of each token's adapter number, and the adapters in native form."""
    if rows is None:
        return 0, []
    assert in_one_piece(rows.of_row) and is_a("int32", rows.of_row), "as the pass reads it"
    return address(rows.of_row), [_bound(adapter) for adapter in rows.adapters]


def _bound(adapter: Adapter) -> _native.Adapter:
    assert adapter.native is not None, "adapters of a native pass have their form for it"
    bound, outside = adapter.native.native, adapter.embedding
    if outside is not None:
        assert isinstance(outside.b, PackedWeight), "its matrices are packed"
        bound.embed(address(outside.a), outside.b.shape[1], outside.b.packed, outside.scale)
    return bound


def _media(media: MediaTokens | None) -> _native.StepMedia:
    """Return the media embeddings that stand in the place of token embeddings."""
    native = importlib.import_module(MODULE)
    if media is None or media.embeddings is None:
        return native.StepMedia(0, 0, 0, 0)
    values, indices = media.embeddings, media.indices
    assert in_one_piece(values, indices) and is_a("bfloat16", values), "as the pass reads it"
    return native.StepMedia(address(indices), len(indices), address(values), values.shape[1] - 1)


def native_pass_obstacle(decoder: Decoder, attention: str) -> str | None:
    """Return why the native pass cannot run this decoder with the attention of this name; None: it can."""
    if not isinstance(decoder.layers[0].mixer.output.weight, PackedWeight):
        return "the weights are not packed for native kernels"
    if attention != NATIVE_ATTENTION:
        return "the attention is not native"
    if any(layer.attention_last_norm is not None for layer in decoder.layers):
        return "its attention is normed twice"
    if any(isinstance(layer.mlp, MoE) and not layer.mlp.spec.is_gated for layer in decoder.layers):
        return "its experts have no gates"
    return None


def float_pass_obstacle(architecture: Architecture) -> str | None:
    """Return why no native pass runs this model in float32; None: one does, if the kernels were built."""
    layers, own = architecture.layers, architecture.attentions
    if architecture.needs_kv or architecture.has_head or architecture.per_layer is not None:
        return "only encoders run natively in float32"
    if any(isinstance(layer.mlp, MoeSpec) or layer.norms_attention_twice or layer.has_scalar for layer in layers):
        return "its layers have experts or further norms"
    further = (one.joint_norm or one.has_gate or one.has_sinks or one.norms_values for one in own)
    if len(own) < len(layers) or any(further):
        return "its attention has further parts"
    if any(one.head_dim % HEAD_MULTIPLE or one.head_dim > MOST_HEAD_DIM for one in own):
        return f"heads are of a multiple of {HEAD_MULTIPLE} up to {MOST_HEAD_DIM} numbers"
    return None


def native_groups(attention: AttentionBackend) -> list[NativeAttention] | None:
    """Return the native attention of each group of layers; None: another one serves."""
    backends = attention.backends if isinstance(attention, GroupedAttention) else (attention,)
    groups = [backend for backend in backends if isinstance(backend, NativeAttention)]
    return groups if len(groups) == len(backends) else None


def _bind(decoder: Decoder, groups: list[NativeAttention]) -> _native.Decoder:
    native = importlib.import_module(MODULE)
    architecture, norm = decoder.architecture, decoder.architecture.norm
    attentions = [group.attention for group in groups]
    form = norm.eps, norm.is_offset, norm.is_centered
    bound: _native.Decoder = native.Decoder(attentions, architecture.hidden_size, *form)
    if decoder.embedding is not None:
        assert isinstance(decoder.embedding, PackedWeight), "its matrices are packed"
        bound.begin(decoder.embedding.packed, decoder.embedding_multiplier)
    if (inputs := decoder.inputs) is not None:
        bound.add_inputs(_packed(inputs.positions), _packed(inputs.types), bind_norm(inputs.norm))
    if decoder.shard.is_last_stage:
        bound.end(bind_norm(decoder.final_norm))
    for layer in decoder.layers:
        bound.add(bind_layer(layer, groups))
    bound.tap(decoder.boundaries)
    return bound


def _packed(table: LinearWeight | None) -> _native.Packed | None:
    assert table is None or isinstance(table, PackedWeight), "tables are packed"
    return None if table is None else table.packed
