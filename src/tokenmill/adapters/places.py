"""Where adapters can be applied in a decoder, and what checkpoints call these places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.kernels.measuring import MeasuringKernels
from tokenmill.kernels.protocol import Kernels
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Linear
from tokenmill.models.mlp import MLP
from tokenmill.models.weight_names import WeightKey
from tokenmill.parallel.shard import Part


@dataclass(frozen=True, slots=True)
class Place:
    """One projection: a module of its own in a checkpoint, here perhaps a part of a fused matrix.

    Attributes:
        module: what checkpoints call it, without `.weight`.
        matrix: the layer, of those that a rank has, and the role of the first projection of the matrix that it is a
            part of.
        start: of its outputs among those of the matrix.
        outputs: which of them are this rank's.
    """

    module: str
    matrix: tuple[int, str]
    start: int
    outputs: Part
    in_size: int


def places_of(decoder: Decoder) -> list[Place]:
    """All projections of attention and of dense feed-forward blocks; experts, routers, embedding and head are none.

    Of several ranks each has a part of some of them.
    """
    return list(_places(decoder))


def all_places(decoder: Decoder, kernels: Kernels) -> list[Place]:
    """Those of the model, of which the decoder may be a rank's."""
    whole = decoder if decoder.shard.is_alone else Decoder(decoder.architecture, MeasuringKernels(kernels))
    return places_of(whole)


def largest_bytes(places: list[Place], max_rank: int) -> int:
    """Bytes that an adapter of this rank takes at most, stored as float32."""
    return sum(4 * max_rank * (place.in_size + place.outputs.count) for place in places)


def _places(decoder: Decoder) -> Iterator[Place]:
    names, first = decoder.architecture.weight_names, decoder.shard.layers(decoder.architecture).start
    for index, layer in enumerate(decoder.layers):
        linears: list[Linear] = [layer.attention.qkv, layer.attention.output]
        if isinstance(layer.mlp, MLP):
            linears += [layer.mlp.gate_up, layer.mlp.down]
        for linear in linears:
            start = 0
            for role, part in linear.parts.items():
                module = WeightKey(role, first + index).name(names).removesuffix(".weight")
                yield Place(module, (index, linear.role), start, part, linear.inputs.total)
                start += part.count
