"""Places in a decoder where adapters can be applied, and their names in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.kernels.measuring import MeasuringKernels
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.moe import MoE
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.sharding.shard import Part


class Place(msgspec.Struct, frozen=True):
    """One projection: a module of its own in a checkpoint, here perhaps a part of a fused matrix.

    Attributes:
        module: its name in checkpoints, without `.weight`.
        matrix: the layer, of those that a rank has, or `OUTSIDE`; and the role of the first projection of the matrix
            that it is a part of.
        start: of its outputs among those of the matrix.
        outputs: this rank's part of them.
    """

    module: str
    matrix: tuple[int, str]
    start: int
    outputs: Part
    in_size: int


def check_adaptable(architecture: Architecture) -> None:
    """Refuse adapters of models whose matrices are not laid out as their checkpoints have them.

    Raises:
        InvalidConfig: it is one.
    """
    is_fused = len(set(architecture.weight_names.values())) < len(architecture.weight_names)
    ropes = (attention.rope for attention in architecture.attentions)
    is_fused |= bool(architecture.recurrences)
    if is_fused or architecture.per_layer is not None or any(rope is not None and rope.share < 1.0 for rope in ropes):
        raise InvalidConfig(f"adapters of {architecture.name} are not supported: merge them into a checkpoint")


OUTSIDE = -1
"""In place of a layer: the embedding and the head."""
EMBEDDING, HEAD = (OUTSIDE, "embedding"), (OUTSIDE, "head")


def places_of(decoder: Decoder) -> list[Place]:
    """Return all projections of attention and dense feed-forward blocks, embedding and head; no experts, no routers.

    Of several ranks each has a part of some of the projections, and none has embedding and head.
    """
    if not decoder.shard.is_alone:
        return list(_places(decoder))
    architecture = decoder.architecture
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    sizes = {EMBEDDING: (hidden, vocab), HEAD: (vocab, hidden)}
    outside = [
        Place(_module(architecture, matrix[1], None), matrix, 0, Part.whole(out_size), in_size)
        for matrix, (out_size, in_size) in sizes.items()
    ]
    return [*_places(decoder), *outside]


def all_places(decoder: Decoder, kernels: Kernels) -> list[Place]:
    """Return the places of the whole model, of which the decoder may be a rank's part."""
    whole = decoder if decoder.shard.is_alone else Decoder(decoder.architecture, MeasuringKernels(kernels))
    return places_of(whole)


def largest_bytes(places: list[Place], max_rank: int) -> int:
    """Return the most bytes that an adapter of this rank takes, stored as float32."""
    return sum(4 * max_rank * (place.in_size + place.outputs.count) for place in places)


def _places(decoder: Decoder) -> Iterator[Place]:
    architecture, first = decoder.architecture, decoder.shard.layers(decoder.architecture).start
    for index, layer in enumerate(decoder.layers):
        assert layer.attention is not None, "an adaptable model has attention in every layer"
        linears: list[Linear] = [layer.attention.qkv, layer.attention.output]
        if not isinstance(layer.mlp, MoE):
            linears += layer.mlp.linears
        for linear in linears:
            start = 0
            for role, part in linear.parts.items():
                module = _module(architecture, role, first + index)
                yield Place(module, (index, linear.role), start, part, linear.inputs.total)
                start += part.count


def _module(architecture: Architecture, role: str, layer: int | None) -> str:
    return WeightKey(role, layer).name(architecture.weight_names).removesuffix(".weight")
