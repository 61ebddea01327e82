"""From what was read to what a step multiplies by: the matrices of an adapter in the form of the model's kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.adapters.reading import ReadAdapter, ReadModule
from tokenmill.kernels.adapters import AdapterPart, LayerAdapters, LinearAdapter
from tokenmill.kernels.protocol import Kernels, WeightRole


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter that steps can use.

    Attributes:
        layers: what it adds to the matrices of each layer of the model.
    """

    digest: str
    rank: int
    layers: Sequence[LayerAdapters]
    num_bytes: int


def pack_adapter(read: ReadAdapter, num_layers: int, kernels: Kernels) -> PackedAdapter:
    """Bring an adapter to the form of these kernels, in their dtype.

    Of q, k and v, or gate and up, that share a matrix the A are stacked, so that a row is multiplied by them at once;
    each B adds to its own outputs.
    """
    matrices: dict[tuple[int, str], list[ReadModule]] = defaultdict(list)
    for module in read.modules:
        matrices[module.place.matrix].append(module)
    layers: list[dict[str, LinearAdapter]] = [{} for _ in range(num_layers)]
    for (layer, role), modules in matrices.items():
        layers[layer][role] = _pack(modules, kernels)
    num_bytes = sum(linear.num_bytes for layer in layers for linear in layer.values())
    return PackedAdapter(read.digest, read.rank, layers, num_bytes)


def _pack(modules: Sequence[ReadModule], kernels: Kernels) -> LinearAdapter:
    a = kernels.linear_weight(sum(len(module.a) for module in modules), modules[0].place.in_size, WeightRole.ADAPTER)
    parts, rank_start = [], 0
    for module in modules:
        rank = len(module.a)
        b = kernels.linear_weight(module.place.out_size, rank, WeightRole.ADAPTER)
        b.load_rows(0, module.b)
        a.load_rows(rank_start, module.a)
        parts.append(AdapterPart(module.place.start, rank_start, b, module.scale))
        rank_start += rank
    return LinearAdapter(a, tuple(parts))
