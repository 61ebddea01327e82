"""A layer whose norms and additions are parts of its four products: what decodes of few rows run on a GPU.

    qkv = norm(h) W;  attention;  h += o W;  inner = gate(norm(h) W);  h += inner W

Each program of a product norms the rows that it reads. Only the products behind attention and the gate write the
hidden states, each program the numbers that it alone has read, so none reads what another one writes in its launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.model.kernels.protocol import FusedProducts
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.mlp import MLP
from tokenmill.model.models.norm import Norm, RMSNorm
from tokenmill.model.models.residual_stream import ResidualStream
from tokenmill.model.models.self_attention import SelfAttention

if TYPE_CHECKING:
    from tokenmill.model.attention.protocol import PlacedAttention


class FusedLayer:
    """The same layer, over the same weights."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm", "_products", "_scale", "_weights")

    def __init__(
        self, attention: tuple[RMSNorm, SelfAttention], mlp: tuple[RMSNorm, MLP], scale: float, products: FusedProducts
    ) -> None:
        """Join the two blocks, each behind its norm; `scale`: factor on what they add."""
        self._attention_norm, self._attention = attention
        self._mlp_norm, self._mlp = mlp
        self._scale, self._products = scale, products
        linears = self._attention.qkv, self._attention.output, *self._mlp.linears
        self._weights = tuple(linear.weight for linear in linears)

    def suits(self, stream: ResidualStream) -> bool:
        """Return True if the stream has so few rows, and nothing is still to be added to it."""
        return stream.delta is None and self._products.suit(stream.hidden, self._weights)

    def forward(self, stream: ResidualStream, attention: PlacedAttention, plan: Any) -> None:
        """Pass the stream through the two blocks."""
        stream.pass_boundary()
        block, mlp, hidden = self._attention, self._mlp, stream.hidden
        way = attention.way_of_heads(block.layer, plan)
        q = self._products.heads(hidden, _norm(self._attention_norm), block.qkv.weight, block.qkv.bias, way)
        self._add(hidden, attention.attend(q, block.layer, plan), block.output)
        gate_up = mlp.gate_up
        inner = self._products.normed(hidden, _norm(self._mlp_norm), gate_up.weight, gate_up.bias, mlp.gate)
        self._add(hidden, inner, mlp.down)

    def _add(self, hidden: Any, x: Any, linear: Linear) -> None:
        self._products.add(hidden, self._scale, x, linear.weight, linear.bias)


def fused_layer(
    attention: tuple[Norm | None, object],
    mlp: tuple[Norm | None, object],
    scale: float,
    products: FusedProducts | None,
) -> FusedLayer | None:
    """Return a layer of two blocks, each behind its norm, with norms and additions in its products, where it can be.

    It has RMSNorms, attention without a gate and without norms of all heads together, and a dense gated block. Nothing
    stands behind its blocks, and it is a rank's alone, since the sums of ranks are added behind a message. Adapters,
    and steps that go on with some of their tokens, are for the caller to see.
    """
    (first, block), (second, dense) = attention, mlp
    if products is None or not isinstance(block, SelfAttention) or not isinstance(dense, MLP):
        return None
    if block.gate is not None or block.joint_norms or not (isinstance(first, RMSNorm) and isinstance(second, RMSNorm)):
        return None
    return FusedLayer((first, block), (second, dense), scale, products)


def _norm(norm: RMSNorm) -> tuple[Any, float, bool]:
    return norm.weight, norm.spec.eps, norm.spec.is_offset
