"""Read an adapter: its two files once, each value checked before it is used.

Every tensor must belong to a module that the config names, and every module that it names must have its two tensors:
anything that would be left out silently is refused by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.model.adapters.config import CONFIG_NAME, AdapterConfig, Strength
from tokenmill.model.adapters.places import EMBEDDING, OUTSIDE, Place, largest_bytes
from tokenmill.model.quantization.layouts import FLOATS
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.safetensors_header import parse_header

WEIGHTS_NAME = "adapter_model.safetensors"
# Names and shapes of the tensors, on top of their values.
_HEADER_BYTES = 16 << 20
_PREFIX = "base_model.model."
# How the names of tensors end that have a meaning in PEFT, and what they belong to.
_FOREIGN = {
    ".lora_magnitude_vector": "the magnitudes of DoRA",
    ".lora_magnitude_vector.weight": "the magnitudes of DoRA",
    ".lora_B.bias": "a bias",
}


class ReadModule(msgspec.Struct, frozen=True):
    """The two matrices of a module: W + scale * b a.

    Attributes:
        a: [rank, in_size]. b: [out_size, rank].
    """

    place: Place
    a: StoredArray
    b: StoredArray
    scale: float


class ReadAdapter(msgspec.Struct, frozen=True):
    """An adapter as its files have it.

    Attributes:
        digest: of both files, 64 hexadecimal digits.
        rank: the largest rank of its modules.
        copies: of the base's weights, which PEFT stores beside adapters of embedding and head; by place.
    """

    digest: str
    rank: int
    modules: tuple[ReadModule, ...]
    copies: Mapping[tuple[int, str], StoredArray]


def read_adapter(folder: Path, places: Sequence[Place], max_rank: int) -> ReadAdapter:
    """Read and check an adapter of a model with these places.

    Raises:
        InvalidCheckpoint: a file is missing, broken or too large, or something in it is not supported; one sentence.
    """
    config, text = AdapterConfig.read(folder)
    path = folder / WEIGHTS_NAME
    outside = {place.module: place for place in places if place.matrix[0] == OUTSIDE}
    strengths = config.strengths([place.module for place in places], list(outside))
    copies = [place for module, place in outside.items() if module in strengths]
    most = largest_bytes(list(places), max_rank) + sum(4 * one.in_size * one.outputs.count for one in copies)
    data = _read_weights(path, most + _HEADER_BYTES)
    for module, strength in strengths.items():
        if strength.rank > max_rank:
            raise InvalidCheckpoint(
                f"{folder / CONFIG_NAME}: {module} has rank {strength.rank}; --max-lora-rank is {max_rank}"
            )
    tensors = _tensors(path, data)
    found = {place.matrix: _copy(path, tensors, place) for place in copies}
    modules = tuple(_modules(path, tensors, places, strengths))
    if not modules:
        raise InvalidCheckpoint(f"{folder / CONFIG_NAME}: target_modules names no module of this model")
    stored = {matrix: tensor for matrix, tensor in found.items() if tensor is not None}
    return ReadAdapter(_digest(text, data), max(len(module.a) for module in modules), modules, stored)


def _copy(path: Path, tensors: dict[str, StoredArray], place: Place) -> StoredArray | None:
    """Take the copy of a module's own weights from among the tensors; None: the file has none."""
    for name in (f"{prefix}{place.module}.base_layer.weight" for prefix in (_PREFIX, "")):
        if name in tensors:
            shape = (place.outputs.count, place.in_size)  # of an embedding the other way round
            return _checked(path, name, tensors.pop(name), shape[::-1] if place.matrix == EMBEDDING else shape)
    return None


def _read_weights(path: Path, most: int) -> bytearray:
    try:
        with open_regular(path) as file:
            data = bytearray(file.read(most + 1))
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
    if len(data) > most:
        raise InvalidCheckpoint(
            f"{path} has more than {most} bytes, which an adapter of --max-lora-rank cannot have here"
        )
    return data


def _tensors(path: Path, data: bytearray) -> dict[str, StoredArray]:
    """Return the tensors of a file in memory, which they share."""
    memory, tensors = np.frombuffer(data, np.uint8), {}
    for name, place in parse_header(data, path).items():
        if place.dtype not in FLOATS:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} is of {place.dtype}; adapters are read in 16 or 32 bit floats"
            )
        own = memory[place.data_start + place.begin : place.data_start + place.end]
        tensors[name] = StoredArray.of_bytes(own, place.dtype, place.shape)
    return tensors


def _digest(*files: bytes | bytearray) -> str:
    digest = hashlib.sha256()
    for data in files:
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _modules(
    path: Path, tensors: dict[str, StoredArray], places: Sequence[Place], strengths: Mapping[str, Strength]
) -> list[ReadModule]:
    left = {name.removeprefix(_PREFIX): name for name in tensors}
    if len(left) < len(tensors):
        raise InvalidCheckpoint(f"{path} has two tensors whose names differ in {_PREFIX} only")
    modules = []
    for place in places:
        strength = strengths.get(place.module)
        if strength is None:
            continue
        pair: dict[str, StoredArray] = {}
        for kind, shape in (("A", (strength.rank, place.in_size)), ("B", (place.outputs.count, strength.rank))):
            end = f"lora_embedding_{kind}" if place.matrix == EMBEDDING else f"lora_{kind}.weight"
            name = left.pop(f"{place.module}.{end}", None)
            if name is None:
                raise InvalidCheckpoint(f"{path} has no lora_{kind} of {place.module}, which target_modules names")
            pair[kind] = _checked(path, name, tensors[name], shape)
        modules.append(ReadModule(place, pair["A"], pair["B"], strength.scale))
    for name in left.values():
        raise InvalidCheckpoint(f"{path}: tensor {name} {_why_unused(name, places)}")
    return modules


def _checked(path: Path, name: str, tensor: StoredArray, shape: tuple[int, int]) -> StoredArray:
    if tensor.shape != shape:
        raise InvalidCheckpoint(f"{path}: tensor {name} has the shape {tensor.shape}, the model needs {shape}")
    if not tensor.is_finite():
        raise InvalidCheckpoint(f"{path}: tensor {name} has NaN or infinite values")
    return tensor


def _why_unused(name: str, places: Sequence[Place]) -> str:
    for end, what in _FOREIGN.items():
        if name.endswith(end):
            return f"is {what}, which is not supported"
    module, _, _ = name.removeprefix(_PREFIX).rpartition(".lora_")
    if any(place.module == module for place in places):
        return "belongs to a module that the config does not name"
    return "belongs to a module that takes no adapters"
