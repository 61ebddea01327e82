"""Pack an adapter for a step: its matrices in the form of the model's kernels."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import EngineFailed, InvalidCheckpoint
from tokenmill.model.adapters.places import EMBEDDING, HEAD, OUTSIDE, all_places, places_of
from tokenmill.model.adapters.reading import ReadModule, read_adapter
from tokenmill.model.kernels.adapter_parts import AdapterModule, AdapterPart, EmbeddingAdapter, LinearAdapter
from tokenmill.model.kernels.adapters import Adapter, AdapterSource
from tokenmill.model.kernels.native_adapter import NativeAdapter
from tokenmill.model.kernels.operands import as_like, host_floats
from tokenmill.model.kernels.protocol import Kernels, WeightRole
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.stored_array import StoredArray, seeded_normal

Matrices = Mapping[tuple[int, str], Sequence[ReadModule]]
"""The modules of each matrix, by its layer and the role of its first projection."""


class PackedAdapter(msgspec.Struct, frozen=True):
    """An adapter that steps can use. `path`: of its folder, for other ranks."""

    digest: str
    rank: int
    adapter: Adapter
    path: str


# Rows of a stored copy that are compared with the model's, which may be held in four bits.
_COMPARED_ROWS, _CLOSE = 64, 0.25


class AdapterForm(Enum):
    """The form in which steps take adapters: kernel by kernel, in one native call, or from slots on a device."""

    KERNELS = auto()
    ONE_CALL = auto()
    SLOTS = auto()


class AdapterReader:
    """Reads adapters into the form in which a model runs, in its dtype; with several ranks, this one's part of them.

    Of q, k and v, or gate and up, that share a matrix the A are stacked, so that a row is multiplied by them at once;
    each B adds to its own outputs.

    Args:
        max_rank: largest rank of an adapter.
        form: the form in which steps take them.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, max_rank: int, form: AdapterForm = AdapterForm.KERNELS
    ) -> None:
        self._places = all_places(decoder, kernels)
        self._own = {place.module: place for place in places_of(decoder)}
        self._decoder = decoder
        self._num_layers = len(decoder.layers)
        self._kernels = kernels
        self._max_rank = max_rank
        self._pack = _PACKERS[form]
        self._is_alone, self._has_slots = decoder.shard.is_alone, form is AdapterForm.SLOTS

    def read(self, path: str) -> PackedAdapter:
        """Read the adapter in a folder.

        Raises:
            InvalidCheckpoint: it cannot be served, and why.
        """
        read = read_adapter(Path(path), self._places, self._max_rank)
        matrices: dict[tuple[int, str], list[ReadModule]] = defaultdict(list)
        for module in read.modules:
            own = self._own.get(module.place.module)
            if module.place.matrix[0] == OUTSIDE:
                if not self._is_alone:
                    raise InvalidCheckpoint(f"{path}: an adapter of {module.place.module} needs one process")
            elif own is not None:
                b = module.b[own.outputs.start : own.outputs.stop]
                matrices[own.matrix].append(msgspec.structs.replace(module, place=own, b=b))
        for matrix, copy in read.copies.items():
            if not self._is_base(matrix, copy):
                raise InvalidCheckpoint(f"{path} brings an {matrix[1]} that is not the model's")
        scaling = self._decoder.architecture.logits_scaling
        outside = {one.place.matrix: _rescaled(one, scaling) for one in read.modules if one.place.matrix[0] == OUTSIDE}
        if self._has_slots:
            matrices |= {matrix: [module] for matrix, module in outside.items()}
        adapter = self._pack(matrices, self._num_layers, self._kernels)
        if outside and not self._has_slots:
            adapter = msgspec.structs.replace(adapter, **_outside(outside, self._kernels))
        return PackedAdapter(read.digest, read.rank, adapter, os.path.abspath(path))

    def _is_base(self, matrix: tuple[int, str], copy: StoredArray) -> bool:
        """Return True if some rows of a copy are those of the model, as far as its form lets them be."""
        weight = self._decoder.embedding if matrix == EMBEDDING else self._decoder.head
        if weight is None:
            return True  # refused for another reason
        ids = np.linspace(0, len(copy) - 1, _COMPARED_ROWS).astype(np.int64)
        theirs = copy[ids].float32()
        x = self._kernels.constant(seeded_normal((4, copy.shape[1]), 1.0, seed=0).values)
        # Beside the steps of a GPU, in another thread, torch alone says which device its tensors are on.
        if matrix == EMBEDDING or self._has_slots:
            ours = host_floats(weight.lookup(as_like(x, ids)))
        else:
            ours, theirs = host_floats(weight.logits(x))[:, ids], host_floats(x) @ theirs.T
        return bool(np.abs(ours - theirs).max() <= _CLOSE * np.abs(theirs).max())


def _rescaled(module: ReadModule, scaling: float) -> ReadModule:
    """Return a module as it adds to the model: of the head to logits that are divided by `scaling` already."""
    scale = module.scale / scaling if module.place.matrix == HEAD else module.scale
    return msgspec.structs.replace(module, scale=scale)


def _outside(modules: Mapping[tuple[int, str], ReadModule], kernels: Kernels) -> dict[str, Any]:
    """Return the parts of an adapter for embedding and head, by the fields of `Adapter`."""
    made: dict[str, Any] = {}
    if HEAD in modules:
        made["head"] = _pack([modules[HEAD]], kernels)
    if EMBEDDING in modules:
        one = modules[EMBEDDING]
        hidden_size, rank = one.b.shape
        b = kernels.linear_weight(hidden_size, rank, WeightRole.ADAPTER)
        b.load_rows(0, one.b)
        columns = kernels.constant(np.ascontiguousarray(one.a.float32().T))
        made["embedding"] = EmbeddingAdapter(columns, b, one.scale)
    return made


class FollowedAdapters:
    """Adapters of a following rank, as rank 0's passes name them: read at first use, forgotten by least recent use.

    Args:
        most: adapters in memory; a pass has no more.
    """

    def __init__(self, reader: AdapterReader, most: int) -> None:
        self._reader = reader
        self._most = most
        self._adapters: OrderedDict[str, PackedAdapter] = OrderedDict()

    def find(self, sources: Sequence[AdapterSource]) -> tuple[Adapter, ...]:
        """Return the adapters of a pass.

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
    # Imported here: what takes adapters from a device's slots computes in torch.
    from tokenmill.model.kernels.stored_tensors import tensor_of

    dtype = kernels.vector(0).dtype

    def module(read: ReadModule) -> AdapterModule:
        a, b = (tensor_of(one).to(dtype) for one in (read.a, read.b))
        # In the order in which a slot holds it: the engine then copies in one piece.
        a = a.T.contiguous().T if read.place.matrix == EMBEDDING else a
        return AdapterModule(read.place.start, a, b, read.scale)

    return Adapter((), None, {matrix: list(map(module, own)) for matrix, own in matrices.items()})


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
