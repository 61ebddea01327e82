"""A dense decoder whose pass is one native call: the same kernels in the same order as `Decoder.forward`, in C++.

Between two kernels of a step Python takes longer than many a kernel, and takes the interpreter's lock each time, which
the engine's other threads want too. Where everything is native anyway, native/decoder.cpp goes from one to the next.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.native import NativeAttention
from tokenmill.attention.protocol import AttentionBackend
from tokenmill.attention.scratch import Scratch
from tokenmill.kernels.native import MODULE
from tokenmill.kernels.native_matrix import PackedMatrix
from tokenmill.models.decoder import Decoder
from tokenmill.models.layer import Layer
from tokenmill.models.linear import Linear
from tokenmill.models.mlp import MLP

if TYPE_CHECKING:
    from tokenmill import _native


class NativeDecoder:
    """A filled decoder bound to the KV memory of one attention. Its outputs have the bits of `Decoder.forward`'s.

    It holds addresses: the weights and the memory stay where they are.
    """

    __slots__ = ("_attention", "_decoder", "_native", "_scratch", "argmax", "logits")

    def __init__(self, decoder: Decoder, attention: NativeAttention) -> None:
        self._decoder = decoder
        self._attention = attention
        self._scratch = Scratch(torch.bfloat16, "cpu")
        self._native = _bind(decoder, attention)
        self.logits = decoder.logits
        self.argmax = decoder.argmax

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """See `Decoder.forward`; the attention is the one that it is bound to."""
        assert attention is self._attention, "the pass is bound to the memory of one attention"
        token_ids, wanted = batch.token_ids, batch.output_indices
        assert token_ids.is_contiguous() and wanted.is_contiguous(), "ids and indices lie in one piece"
        step = self._attention.plan(batch, self._decoder.rotary).step
        tokens, outputs = len(token_ids), len(wanted)
        scratch = self._scratch.take(self._native.scratch_numbers(tokens))
        out = torch.empty(outputs, self._decoder.architecture.hidden_size, dtype=torch.bfloat16)
        addresses = (scratch.data_ptr(), out.data_ptr())
        self._native.forward(step, token_ids.data_ptr(), tokens, wanted.data_ptr(), outputs, *addresses)
        return out


def in_one_call(decoder: Decoder, attention: AttentionBackend) -> Decoder | NativeDecoder:
    """The decoder with its passes in one call each, if all that it is made of is native and dense; else as it is."""
    is_dense = isinstance(decoder.embedding, PackedMatrix) and all(
        isinstance(layer.mlp, MLP) for layer in decoder.layers
    )
    if is_dense and isinstance(attention, NativeAttention):
        return NativeDecoder(decoder, attention)
    return decoder


def _bind(decoder: Decoder, attention: NativeAttention) -> _native.Decoder:
    native = importlib.import_module(MODULE)
    assert isinstance(decoder.embedding, PackedMatrix), "its matrices are packed"
    norm = decoder.final_norm
    bound: _native.Decoder = native.Decoder(
        attention.attention, decoder.embedding.packed, norm.weight.data_ptr(), norm.eps
    )
    for layer in decoder.layers:
        bound.add(_bind_layer(native, layer, attention))
    return bound


def _bind_layer(native: Any, layer: Layer, attention: NativeAttention) -> _native.DecoderLayer:
    own, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP), "its layers are dense"
    bound: _native.DecoderLayer = native.DecoderLayer(
        attention_norm=layer.attention_norm.weight.data_ptr(),
        qkv=_projection(native, own.qkv),
        head_norms=attention.head_norms(own.norms),
        memory=attention.memory[own.layer],
        window=own.window or 0,
        output=_projection(native, own.output),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        gate_up=_projection(native, mlp.gate_up),
        down=_projection(native, mlp.down),
    )
    return bound


def _projection(native: Any, linear: Linear) -> _native.Projection:
    assert isinstance(linear.weight, PackedMatrix), "its matrices are packed"
    projection: _native.Projection = native.Projection(
        linear.weight.packed, 0 if linear.bias is None else linear.bias.data_ptr()
    )
    return projection
