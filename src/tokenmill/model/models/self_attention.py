"""The attention block of a layer: fused qkv, the backend's attention (norms of q and k, rotary, cache), output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.model.architecture.architecture import SelfAttentionSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.attention.protocol import AttentionLayer
from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.kv_places import KVPlace
from tokenmill.model.models.linear import Linear, second_linear
from tokenmill.model.models.norm import LayerNorm, Norm, make_norm
from tokenmill.model.models.rotary import rotated_order
from tokenmill.model.models.targets import Order, Target, TargetScope
from tokenmill.model.sharding.collective import Collective
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.attention.protocol import AttentionBackend
    from tokenmill.model.kernels.adapters import AdaptedLayer


class SelfAttention:
    """Attention of one layer; the KV it writes belongs to the backend.

    Args:
        place: the place of its KV.
        rotary: the tables of every kind of rope in the model.

    Attributes:
        spec: specification of this rank's heads. heads: this rank's part of all query heads.
        layer: description of this layer for the backend.
        gate: the projection whose sigmoid multiplies the output of attention; None: absent.
        joint_norms: of all heads of q together, and of those of k; empty: absent.
    """

    __slots__ = ("_collective", "_kernels", "gate", "heads", "joint_norms", "layer", "output", "qkv", "spec")

    def __init__(
        self,
        spec: SelfAttentionSpec,
        place: KVPlace,
        hidden_size: int,
        rotary: Mapping[RopeSpec, RotaryTables],
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        shard, self._collective, self._kernels = collective.shard, collective, kernels
        self.spec = shard.attention(spec)
        self.heads, kv_heads = shard.heads(spec)
        q, kv = self.heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        parts = {"q": q, "k": kv, "v": kv}
        if place.reads_only or spec.values_are_keys:
            parts = {"q": q} if place.reads_only else {"q": q, "k": kv}
        unbiased = () if spec.has_key_bias else ("k",)
        self.qkv = Linear(spec.num_inputs * hidden_size, parts, spec.qkv_bias, kernels, unbiased=unbiased)
        self.gate = Linear(hidden_size, {"attention_gate": q}, spec.qkv_bias, kernels) if spec.has_gate else None
        self.output = second_linear("output", q, hidden_size, spec.output_bias, kernels, collective)
        self.joint_norms: dict[str, Norm] = {}
        if spec.joint_norm is not None:
            sizes = {"q_norm": self.spec.q_size, "k_norm": self.spec.kv_size}
            self.joint_norms = {role: make_norm(size, spec.joint_norm, kernels) for role, size in sizes.items()}
        norms = None
        if spec.head_norm is not None:
            of_q = kernels.vector(spec.head_dim)
            of_k = of_q if place.reads_only else kernels.vector(spec.head_dim)
            of_v = kernels.constant(np.ones(spec.head_dim, np.float32)) if spec.norms_values else None
            norms = HeadNorms(of_q, of_k, spec.head_norm.eps, spec.head_norm.is_offset, of_v)
        tables = None if spec.rope is None else rotary[spec.rope]
        sinks = kernels.vector(self.heads.count) if spec.has_sinks else None
        slopes = alibi_slopes(spec.num_heads)[self.heads.start : self.heads.stop] if spec.has_alibi else None
        where = place.group, place.reads_only, spec.first_key, spec.ahead, slopes
        self.layer = AttentionLayer(place.index, spec.scale, spec.window, norms, tables, sinks, *where)

    def attend(
        self, x: torch.Tensor, attention: AttentionBackend, plan: Any, adapted: AdaptedLayer | None = None
    ) -> torch.Tensor:
        """Map x [T, hidden] to [T, q_size], the output projection's input; write the tokens' k and v into the cache."""
        qkv, start = self.qkv.forward(x, adapted), 0
        for norm in self.joint_norms.values():
            columns = qkv[:, start : start + len(norm.weight)]
            columns.copy_(norm.forward(columns.contiguous()))
            start += len(norm.weight)
        if self.repeats:
            qkv = self._with_values(qkv)
        own = attention.forward(qkv, self.layer, plan)
        if self.gate is not None:
            own = self._kernels.sigmoid_gate(own, self.gate.forward(x))
        return self._collective.between(own, self.heads.times(self.spec.head_dim))

    @property
    def repeats(self) -> int:
        """Width of the keys of one token that are its values, too; 0: values have a projection, or are not its own."""
        return self.spec.kv_size if self.spec.values_are_keys else 0

    def _with_values(self, qk: torch.Tensor) -> torch.Tensor:
        """Return |q|k|k|, [T, q_size + 2 * kv_size], of |q|k|."""
        size, width = self.repeats, qk.shape[1]
        qkv = qk.new_empty(len(qk), width + size)
        qkv[:, :width], qkv[:, width:] = qk, qk[:, width - size :]
        return qkv

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        order = () if self.spec.rope is None else rotated_order(self.spec.rope, self.spec.head_dim)
        if self.gate is None:
            yield from self.qkv.targets(scope, {"q": order, "k": order})
        else:
            yield from self._gated_targets(scope, self.gate, order)
        yield from self.output.targets(scope)
        if self.layer.sinks is not None:
            yield scope.vector("attention", self.layer.sinks, "sinks", self.heads)
        for role, norm in self.joint_norms.items():
            yield scope.vector(role, norm.weight, order=order)
            if isinstance(norm, LayerNorm) and norm.bias is not None:
                yield scope.vector(role, norm.bias, "bias", order=order)
        if self.layer.norms is not None:
            yield scope.vector("q_norm", self.layer.norms.q, order=order)
            if not self.layer.reads_only:
                yield scope.vector("k_norm", self.layer.norms.k, order=order)

    def _gated_targets(self, scope: TargetScope, gate: Linear, order: Order) -> Iterator[Target]:
        """Yield targets where each head of q has its gate behind it: |q of head 0|gate of head 0|q of head 1| ..."""
        size, heads, kv = self.spec.head_dim, self.spec.num_heads, self.spec.kv_size
        total = 2 * heads * size
        places = [2 * size * head for head in range(heads)]
        of_q = [place + row for place in places for row in (order or range(size))]
        of_gate = [place + size + row for place in places for row in range(size)]
        yield scope.picked("q", self.qkv.weight, 0, of_q, total)
        yield scope.matrix("k", self.qkv.weight, heads * size, Part.whole(kv), order=order)
        yield scope.matrix("v", self.qkv.weight, heads * size + kv, Part.whole(kv))
        yield scope.picked("attention_gate", gate.weight, 0, of_gate, total)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-8k/n) for k from 1 to n where n heads are a power of two.

    Other numbers of heads have the slopes of the next lower power, then every other one of its double.
    """
    power = 1 << num_heads.bit_length() - 1
    own = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    between = [2 ** (-4 * number / power) for number in range(1, 2 * power, 2)]
    return (*own, *between[: num_heads - power])
