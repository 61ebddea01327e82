"""From what was read to what a step multiplies by: the matrices of an adapter in the form of the model's kernels."""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from tokenmill.adapters.places import all_places, places_of
from tokenmill.adapters.reading import ReadModule, read_adapter
from tokenmill.core.errors import EngineFailed
from tokenmill.kernels.adapters import Adapter, AdapterModule, AdapterPart, AdapterSource, LinearAdapter
from tokenmill.kernels.native_adapter import NativeAdapter
from tokenmill.kernels.protocol import Kernels, WeightRole
from tokenmill.models.decoder import Decoder

Matrices = Mapping[tuple[int, str], Sequence[ReadModule]]
"""The modules of each matrix, by its layer and the role of its first projection."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter that steps can use. `path`: of its folder, for other ranks."""

    digest: str
    rank: int
    adapter: Adapter
    path: str


class AdapterForm(Enum):
    """In which form steps take adapters: kernel by kernel, in one native call, or from slots of a device's memory."""

    KERNELS = auto()
    ONE_CALL = auto()
    SLOTS = auto()


class AdapterReader:
    """Reads adapters into the form in which a model runs, in its dtype: of several ranks, this one's part of them.

    Of q, k and v, or gate and up, that share a matrix the A are stacked, so that a row is multiplied by them at once;
    each B adds to its own outputs.

    Args:
        max_rank: of each.
        form: in which steps take them.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, max_rank: int, form: AdapterForm = AdapterForm.KERNELS
    ) -> None:
        self._places = all_places(decoder, kernels)
        self._own = {place.module: place for place in places_of(decoder)}
        self._num_layers = len(decoder.layers)
        self._kernels = kernels
        self._max_rank = max_rank
        self._pack = _PACKERS[form]

    def read(self, path: str) -> PackedAdapter:
        """The adapter in a folder.

        Raises:
            InvalidCheckpoint: it cannot be served, and why.
        """
        read = read_adapter(Path(path), self._places, self._max_rank)
        matrices: dict[tuple[int, str], list[ReadModule]] = defaultdict(list)
        for module in read.modules:
            own = self._own.get(module.place.module)
            if own is not None:
                b = module.b[own.outputs.start : own.outputs.stop]
                matrices[own.matrix].append(dataclasses.replace(module, place=own, b=b))
        adapter = self._pack(matrices, self._num_layers, self._kernels)
        return PackedAdapter(read.digest, read.rank, adapter, os.path.abspath(path))


class FollowedAdapters:
    """What a rank that follows has of the adapters that rank 0's passes name: read when a pass first needs it, and
    forgotten by least recent use.

    Args:
        most: adapters in memory; a pass has no more.
    """

    def __init__(self, reader: AdapterReader, most: int) -> None:
        self._reader = reader
        self._most = most
        self._adapters: OrderedDict[str, PackedAdapter] = OrderedDict()

    def find(self, sources: Sequence[AdapterSource]) -> tuple[Adapter, ...]:
        """The adapters of a pass.

        Raises:
            EngineFailed: a folder does not have what rank 0 has read there.
        """
        return tuple(self._find(*source).adapter for source in sources)

    def _find(self, digest: str, path: str) -> PackedAdapter:
        if digest not in self._adapters:
            read = self._reader.read(path)
            if read.digest != digest:
                raise EngineFailed(f"{path} has another adapter than rank 0 has read there")
            self._adapters[digest] = read
            while len(self._adapters) > self._most:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(digest)
        return self._adapters[digest]


def _for_one_call(matrices: Matrices, num_layers: int, kernels: Kernels) -> Adapter:
    native = NativeAdapter(num_layers)
    for (layer, role), modules in matrices.items():
        native.add(layer, role, [AdapterModule(one.place.start, one.a, one.b, one.scale) for one in modules])
    return Adapter((), native)


def _for_slots(matrices: Matrices, num_layers: int, kernels: Kernels) -> Adapter:
    dtype = kernels.vector(0).dtype
    modules = {
        matrix: [AdapterModule(one.place.start, one.a.to(dtype), one.b.to(dtype), one.scale) for one in own]
        for matrix, own in matrices.items()
    }
    return Adapter((), None, modules)


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
        b = kernels.linear_weight(module.place.outputs.count, rank, WeightRole.ADAPTER)
        b.load_rows(0, module.b)
        a.load_rows(rank_start, module.a)
        parts.append(AdapterPart(module.place.start, rank_start, b, module.scale))
        rank_start += rank
    return LinearAdapter(a, tuple(parts))


_PACKERS = {
    AdapterForm.KERNELS: _for_kernels,
    AdapterForm.ONE_CALL: _for_one_call,
    AdapterForm.SLOTS: _for_slots,
}
