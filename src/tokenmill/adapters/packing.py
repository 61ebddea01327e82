"""From what was read to what a step multiplies by: the matrices of an adapter in the form of the model's kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.adapters.reading import ReadAdapter, ReadModule
from tokenmill.kernels.adapters import Adapter, AdapterPart, LinearAdapter
from tokenmill.kernels.native_adapter import AdapterModule, NativeAdapter
from tokenmill.kernels.protocol import Kernels, WeightRole

Matrices = Mapping[tuple[int, str], Sequence[ReadModule]]
"""The modules of each matrix, by its layer and the role of its first projection."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter that steps can use."""

    digest: str
    rank: int
    adapter: Adapter


def pack_adapter(read: ReadAdapter, num_layers: int, kernels: Kernels, in_one_call: bool) -> PackedAdapter:
    """Bring an adapter to the form in which the model runs, in its dtype.

    Of q, k and v, or gate and up, that share a matrix the A are stacked, so that a row is multiplied by them at once;
    each B adds to its own outputs.

    Args:
        in_one_call: passes are native, in one call each.
    """
    matrices: dict[tuple[int, str], list[ReadModule]] = defaultdict(list)
    for module in read.modules:
        matrices[module.place.matrix].append(module)
    pack = _for_one_call if in_one_call else _for_kernels
    return PackedAdapter(read.digest, read.rank, pack(matrices, num_layers, kernels))


def _for_one_call(matrices: Matrices, num_layers: int, kernels: Kernels) -> Adapter:
    native = NativeAdapter(num_layers)
    for (layer, role), modules in matrices.items():
        native.add(layer, role, [AdapterModule(one.place.start, one.a, one.b, one.scale) for one in modules])
    return Adapter((), native)


def _for_kernels(matrices: Matrices, num_layers: int, kernels: Kernels) -> Adapter:
    layers: list[dict[str, LinearAdapter]] = [{} for _ in range(num_layers)]
    for (layer, role), modules in matrices.items():
        layers[layer][role] = _pack(modules, kernels)
    return Adapter(layers, None)


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
