"""Backend `native`: the C++ attention over the packed KV cache, for bfloat16 models on CPUs.

One call a layer does all between two linear layers: norms and rotation of the heads, the write into the cache,
attention. A token's result depends only on its own past, bit for bit: not on its batch, its chunk or the number of
threads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.attention.batch import ForwardBatch, MediaAngles
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.operands import in_one_piece, is_a, stride
from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import host_array, library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.attention.context import ContextRanks
    from tokenmill.model.kernels.heads import CosSin
    from tokenmill.platform.arrays import AnyArray, Array


# Number of the C++ `KVFormat` by dtype on the host: bfloat16, int8, int4 in bytes.
FORMATS = {"uint16": 0, "int8": 1, "uint8": 2}


class NativePlan(msgspec.Struct, frozen=True):
    """A step cut into pieces, with the arrays whose addresses it holds.

    Attributes:
        angles: angles of its tokens, where they do not follow from the positions in the sequence.
    """

    step: _native.PlannedStep
    batch: ForwardBatch
    angles: CosSin | None


class NativeAttention:
    """The `AttentionBackend` that runs a layer in one native call.

    Attributes:
        attention: its C++ side.
        memory: the KV memory of each layer.
        ranks: share its steps; None: they are one rank's.
    """

    def __init__(
        self, spec: AttentionSpec, kv: PackedKV, kernels: _native.Kernels, ranks: ContextRanks | None = None
    ) -> None:
        self.spec = spec
        self.kv = kv
        native = importlib.import_module(MODULE)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention: _native.Attention = native.Attention(kernels, *heads, kv.page_size, not spec.sees_ahead)
        self.ranks = ranks
        self._meeting = None if ranks is None else ranks.native(spec.num_heads * spec.head_dim)
        if self._meeting is not None:
            self.attention.share(self._meeting)
        self._bound: dict[AttentionLayer, _native.AttentionLayer] = {}
        self._slopes: list[npt.NDArray[np.float32]] = []  # of bound layers, which hold addresses
        key_scales, value_scales = kv.tensors[2:] or (None, None)
        self.memory: list[_native.LayerKV] = [
            native.LayerKV(_numbers(kv.keys, key_scales, layer), _numbers(kv.values, value_scales, layer))
            for layer in range(spec.num_layers)
        ]

    def plan(self, batch: ForwardBatch) -> NativePlan:
        """Cut the step into pieces natively, from its lengths, page table and angles."""
        for lengths in (batch.query_starts, batch.context_lens):
            assert lengths.dtype == np.int32 and lengths.flags.c_contiguous, "lengths are int32 in one piece"
        pages = batch.page_table
        assert is_a("int32", pages) and stride(pages, 1) == 1, "a page table is int32 rows"
        media = batch.media
        angles = None if media is None or media.angles is None else _angles(media.angles)
        cos, sin = (0, 0) if angles is None else map(address, angles)
        sights = 0
        if media is not None and media.sights is not None and self.spec.spans_see_ahead:
            assert is_piece(media.sights, "int32") and not self.spec.sees_ahead, "sights are those of a causal model"
            sights = address(media.sights)
        step = self.attention.plan(
            len(batch.query_lens),
            batch.query_starts.ctypes.data,
            batch.context_lens.ctypes.data,
            address(pages),
            stride(pages),
            cos,
            sin,
            batch.are_own_rows,
            sights,
        )
        return NativePlan(step, batch, angles)

    def forward(self, qkv: AnyArray, layer: AttentionLayer, plan: NativePlan) -> AnyArray:
        """Norm, rotate, write and attend in one native call."""
        assert is_piece(qkv, "uint16"), "the projection is bfloat16 in one piece"
        out = library_of(qkv).empty((len(qkv), self.spec.num_heads * self.spec.head_dim), "bfloat16")
        self.attention.forward(plan.step, self.bound(layer), address(qkv), address(out))
        self.check()
        return out

    def check(self) -> None:
        """Raise if the ranks that share its steps were not met: then no output counts."""
        if self._meeting is not None and self._meeting.has_failed:
            assert self.ranks is not None, "whom it meets"
            raise self.ranks.failure()

    def bound(self, layer: AttentionLayer) -> _native.AttentionLayer:
        """Return the native form of a layer, with its KV memory; made once per layer."""
        if layer not in self._bound:
            self._bound[layer] = self._bind(layer)
        return self._bound[layer]

    def _bind(self, layer: AttentionLayer) -> _native.AttentionLayer:
        native = importlib.import_module(MODULE)
        norms, rotary, cos, sin = layer.norms, layer.rotary, 0, 0
        weights = native.HeadNorms(0, 0, 0, 0.0, False)
        if norms is not None:
            own = (0 if weight is None else address(weight) for weight in (norms.q, norms.k, norms.v))
            weights = native.HeadNorms(*own, norms.eps, norms.are_offsets)
        if rotary is not None:
            assert in_one_piece(rotary.cos, rotary.sin), "the angles' tables lie in one piece"
            cos, sin = address(rotary.cos), address(rotary.sin)
        memory = self.memory[layer.index]
        sinks = 0
        if layer.sinks is not None:
            assert is_a("bfloat16", layer.sinks) and in_one_piece(layer.sinks), "sinks are bfloat16 in one piece"
            sinks = address(layer.sinks)
        ahead = -1 if layer.ahead is None else layer.ahead
        slopes = 0
        if layer.slopes is not None:
            self._slopes.append(np.array(layer.slopes, np.float32))
            slopes = address(self._slopes[-1])
        numbers = layer.scale, layer.window or 0, sinks, layer.reads_only, layer.first_key, ahead, slopes
        bound: _native.AttentionLayer = native.AttentionLayer(memory, weights, cos, sin, *numbers)
        return bound


def _numbers(memory: Array, scales: Array | None, layer: int) -> _native.KVNumbers:
    """Return the keys or the values of a layer as C++ takes them; a byte of int4 is two numbers."""
    native = importlib.import_module(MODULE)
    form = FORMATS[host_array(memory).dtype.name]
    page = stride(memory, 1) * (2 if form == FORMATS["uint8"] else 1)
    own = () if scales is None else (address(scales[layer]), stride(scales, 1))
    numbers: _native.KVNumbers = native.KVNumbers(address(memory[layer]), page, form, *own)
    return numbers


def is_piece(array: Array, dtype: str | None = None) -> bool:
    """Return True if an array, or a tensor, lies in one piece; and has this dtype on the host, if one is given."""
    own = host_array(array)
    return bool(own.flags.c_contiguous) and dtype in (None, own.dtype.name)


def _angles(angles: MediaAngles) -> CosSin:
    """Return cos and sin of tokens whose frequencies turn by one of several positions, [T, head_dim / 2] each."""
    positions, axes = host_array(angles.positions), host_array(angles.axes)
    places, columns = np.ascontiguousarray(positions[axes].T), np.arange(len(axes))
    cos, sin = (host_array(table)[places, columns] for table in (angles.rotary.cos, angles.rotary.sin))
    assert is_piece(cos) and is_piece(sin), "angles lie in one piece"
    return cos, sin
