"""Bind a decoder's layers to a native pass, by address: their weights, their KV memory, and inputs of their own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_kernels import NativeExperts
from tokenmill.model.kernels.native_ops import bound_scores
from tokenmill.model.kernels.native_weight import STORED_ELEMENTS
from tokenmill.model.kernels.operands import in_one_piece, rounded
from tokenmill.model.models.layer import Layer
from tokenmill.model.models.mlp import MLP, PlainMLP
from tokenmill.model.models.moe import MixtureNorms, MoE
from tokenmill.model.models.native_projection import address_of, bind_projection
from tokenmill.model.models.native_recurrence import bind_recurrence
from tokenmill.model.models.norm import LayerNorm, Norm
from tokenmill.model.models.self_attention import SelfAttention
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.architecture.architecture import Architecture
    from tokenmill.model.models.per_layer import PerLayerInputs

# A block has a gate or an activation; the number of the other is not looked at.
UNUSED = 0


def bind_layer(layer: Layer, groups: Sequence[NativeAttention]) -> _native.DecoderLayer:
    """Bind a layer. `groups`: the attention of each group of layers."""
    native, own = importlib.import_module(MODULE), layer.attention
    has_in_norms = layer.attention_norm is not None
    assert has_in_norms or layer.spec.residual_multiplier == 1, "without a norm before it, a sum is just added"
    norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
    assert layer.spec.residual_multiplier == 1 or not layer.spec.norm.is_centered, "a LayerNorm just adds"
    bound: _native.DecoderLayer = native.DecoderLayer(
        norms=native.LayerNorms(*map(bind_norm, norms), are_of_sums=layer.spec.norms_after),
        attention=None if own is None else _bind_attention(native, own, groups[own.layer.group]),
        recurrence=None if layer.recurrence is None else bind_recurrence(layer.recurrence),
        output=bind_projection(layer.mixer.output, layer.mixer.output.columns.start),
        block=_bind_block(native, layer.mlp),
        residual_multiplier=layer.spec.residual_multiplier,
        end=_bind_end(native, layer),
    )
    if layer.hidden_norm is not None:
        bound.pair(address_of(layer.hidden_norm.weight), layer.spec.begins_normed)
    return bound


def bind_inputs(native: _native.Decoder, inputs: PerLayerInputs, architecture: Architecture) -> None:
    """Bind the inputs that layers have of their own; their table has to be mapped."""
    assert inputs.table is not None and architecture.per_layer is not None, "the table is mapped with the weights"
    assert in_one_piece(inputs.table.values), "a row of the table is in one piece"
    size, table = architecture.per_layer.size, (address(inputs.table.values), STORED_ELEMENTS[inputs.table.dtype])
    # The scale is rounded to the model's dtype, as that of the embeddings is.
    scales = architecture.hidden_size**-0.5, rounded(size**0.5, "bfloat16")
    native.give_inputs(bind_projection(inputs.projection), address(inputs.norm.weight), size, *table, *scales)


def bind_norm(norm: Norm | None) -> _native.Norm:
    """Bind a norm of hidden states; None: an absent one."""
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    bound: _native.Norm = importlib.import_module(MODULE).Norm(
        0 if norm is None else address_of(norm.weight), address_of(bias)
    )
    return bound


def _bind_attention(native: Any, own: SelfAttention, group: NativeAttention) -> _native.DecoderAttention:
    gate = None if own.gate is None else bind_projection(own.gate)
    bound: _native.DecoderAttention = native.DecoderAttention(
        group=own.layer.group,
        qkv=bind_projection(own.qkv),
        layer=group.bound(own.layer),
        gate=gate,
        repeated=own.repeats,
    )
    if own.joint_norms:
        q, k = own.joint_norms["q_norm"], own.joint_norms["k_norm"]
        vectors = address_of(q.weight), len(q.weight), address_of(k.weight), len(k.weight)
        bound.norm_heads(*vectors, q.spec.eps, q.spec.is_offset)
    return bound


def _bind_block(native: Any, mlp: MLP | PlainMLP | MoE) -> _native.FeedForward:
    bound: _native.FeedForward = native.FeedForward()
    if isinstance(mlp, MoE):
        _bind_mixture(native, bound, mlp)
    else:
        _bind_dense(bound, mlp)
    return bound


def _bind_dense(bound: _native.FeedForward, mlp: MLP | PlainMLP) -> None:
    first, down = mlp.linears
    kinds = (mlp.gate, UNUSED) if isinstance(mlp, MLP) else (UNUSED, mlp.activation)
    bound.run_all(bind_projection(first, first.columns.start), bind_projection(down, down.columns.start), *kinds)


def _bind_mixture(native: Any, bound: _native.FeedForward, moe: MoE) -> None:
    assert isinstance(moe.experts, NativeExperts) and moe.inner.is_whole, "experts are packed, and whole on a rank"
    experts, gate = moe.experts.bind(), None
    experts.share(moe.part.start, moe.part.total)
    if moe.shared is not None:
        _bind_dense(bound, moe.shared)
        gate = None if moe.shared_gate is None else bind_projection(moe.shared_gate)
    spec, scores = moe.spec, bound_scores(moe.scores, moe.spec.num_experts)
    routing = bind_projection(moe.router), experts, spec.experts_per_token, spec.norm_topk_prob, gate, *scores
    norms = None if moe.norms is None else _bind_norms(native, moe.norms)
    bound.mix(*routing, address_of(moe.scales), norms)


def _bind_norms(native: Any, own: MixtureNorms) -> _native.MixtureNorms:
    weights = (address_of(norm.weight) for norm in (own.router, own.inputs, own.mixed, own.shared))
    bound: _native.MixtureNorms = native.MixtureNorms(*weights, own.router_scale)
    return bound


def _bind_end(native: Any, layer: Layer) -> _native.LayerEnd:
    end: _native.LayerEnd = native.LayerEnd()
    if layer.scalar is not None:
        end.multiply(address_of(layer.scalar))
    if (third := layer.per_layer) is not None:
        end.gate(bind_projection(third.gate), bind_projection(third.output), address_of(third.norm.weight))
    return end
