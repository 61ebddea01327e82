"""Where adapters can be applied in a decoder, and what checkpoints call these places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Linear
from tokenmill.models.mlp import MLP
from tokenmill.models.weight_names import WeightKey


@dataclass(frozen=True, slots=True)
class Place:
    """One projection: a module of its own in a checkpoint, here perhaps a part of a fused matrix.

    Attributes:
        module: what checkpoints call it, without `.weight`.
        matrix: the layer, and the role of the first projection of the matrix that it is a part of.
        start: of its outputs among those of the matrix.
    """

    module: str
    matrix: tuple[int, str]
    start: int
    out_size: int
    in_size: int


def places_of(decoder: Decoder) -> list[Place]:
    """All projections of attention and of dense feed-forward blocks; experts, routers, embedding and head are none."""
    return list(_places(decoder))


def largest_bytes(places: list[Place], max_rank: int) -> int:
    """Bytes that an adapter of this rank takes at most, stored as float32."""
    return sum(4 * max_rank * (place.in_size + place.out_size) for place in places)


def _places(decoder: Decoder) -> Iterator[Place]:
    names = decoder.architecture.weight_names
    for index, layer in enumerate(decoder.layers):
        linears: list[Linear] = [layer.attention.qkv, layer.attention.output]
        if isinstance(layer.mlp, MLP):
            linears += [layer.mlp.gate_up, layer.mlp.down]
        for linear in linears:
            start = 0
            for role, part in linear.parts.items():
                module = WeightKey(role, index).name(names).removesuffix(".weight")
                yield Place(module, (index, linear.role), start, part.count, linear.weight.shape[1])
                start += part.count
