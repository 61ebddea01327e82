"""A GGUF file, perhaps in parts: metadata by key and tensors by name."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.config.gguf_names import split_place
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.file_part import read_bytes
from tokenmill.model.weights.gguf.header import Metadata, read_header

MOST_LINKS = 40


class GgufTensor(msgspec.Struct, frozen=True):
    """The place of a tensor in a file.

    Attributes:
        kind: its type by llama.cpp's name, e.g. `Q4_K`.
        shape: in the usual order, rows first.
        begin: byte in the file.
        block: numbers that are stored together.
        is_part: it is the part of a tensor that a rank has.
        stride: bytes from one row to the next, of a part of each row; 0: rows lie side by side.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    block: int = 1
    is_part: bool = False
    stride: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of all its matrices together, or of a vector's numbers."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    def rows(self, start: int, count: int) -> GgufTensor:
        """Return some of its rows, which lie side by side."""
        row_bytes = self.num_bytes // self.num_rows
        return msgspec.structs.replace(
            self,
            shape=(count, *self.shape[-1:]) if len(self.shape) > 1 else (count,),
            begin=self.begin + start * row_bytes,
            num_bytes=count * row_bytes,
            is_part=True,
        )

    def columns(self, part: Part) -> GgufTensor:
        """Return some of the numbers of each row, whole blocks."""
        row_bytes = self.num_bytes // self.num_rows
        return msgspec.structs.replace(
            self,
            shape=(*self.shape[:-1], part.count),
            begin=self.begin + row_bytes * part.start // part.total,
            num_bytes=self.num_bytes * part.count // part.total,
            is_part=True,
            stride=row_bytes,
        )

    def data(self) -> npt.NDArray[np.uint8]:
        """Return its bytes, mapped, private if they are written, for as long as the array lives; a part is read
        instead: a mapping reads ahead."""
        if not self.is_part:
            return np.asarray(np.memmap(self.file, np.uint8, "c", self.begin, (self.num_bytes,)))
        data = np.empty(self.num_bytes, np.uint8)
        runs = data.reshape(self.num_rows if self.stride else 1, -1)
        with self.file.open("rb", buffering=0) as file:
            for number, run in enumerate(runs):
                read_bytes(file.fileno(), run.data, self.begin + number * self.stride, self.file)
        return data


class GgufFile(msgspec.Struct, frozen=True):
    """The metadata and tensors of a file, or of all parts of a split one; the tensors' data stay where they are."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]

    def floats(self, name: str) -> list[float] | None:
        """Return the numbers of a float32 tensor; None: the file has no such tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else [float(one) for one in tensor.data().view(np.float32)]


def open_gguf(path: Path) -> GgufFile:
    """Read the header; of the first part of a split file, the headers of all parts.

    Raises:
        InvalidCheckpoint: a file is truncated or no GGUF; a part is missing or belongs to another file.
    """
    path = _named(path)
    files = part_paths(path)
    headers = [read_header(one) for one in files]
    tensors: dict[str, GgufTensor] = {}
    for one, header in zip(files, headers, strict=True):
        for place in header.tensors:
            if place.name in tensors:
                raise InvalidCheckpoint(f"{one} has tensor {place.name} twice, or another part has it, too")
            tensors[place.name] = GgufTensor(
                place.name, one, place.kind.name, place.shape, place.begin, place.num_bytes, place.kind.block
            )
    if len(files) > 1:
        _check_parts(files, [header.metadata for header in headers], len(tensors))
    return GgufFile(path, headers[0].metadata, tensors)


def _named(path: Path) -> Path:
    """Follow links until a name says that it is a part: in the hub's cache the file behind has a digest for a name."""
    for _ in range(MOST_LINKS):
        if split_place(path.name) or not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return path


def part_paths(path: Path) -> list[Path]:
    """Return the files that a GGUF file consists of, in order: itself, or all parts of a split file.

    Raises:
        InvalidCheckpoint: it is a later part of a split file, or a part is missing.
    """
    place = split_place(path.name)
    if place is None:
        return [path]
    if place.number != 1:
        raise InvalidCheckpoint(f"{path} is part {place.number} of a split file; give part 1: {place.part(1)}")
    files = [path.with_name(place.part(number)) for number in range(1, place.count + 1)]
    for one in files:
        if not one.is_file():
            raise InvalidCheckpoint(f"{path} is split in {place.count} parts, of which {one.name} is missing beside it")
    return files


def _check_parts(files: list[Path], parts: list[Metadata], num_tensors: int) -> None:
    for number, (file, metadata) in enumerate(zip(files, parts, strict=True)):
        said = metadata.get("split.no", number), metadata.get("split.count", len(files))
        if said != (number, len(files)):
            raise InvalidCheckpoint(
                f"{file} says that it is part {said[0] + 1} of {said[1]}, its name part {number + 1} of {len(files)}"
            )
    wanted = parts[0].get("split.tensors.count", num_tensors)
    if wanted != num_tensors:
        raise InvalidCheckpoint(f"{files[0]}: all parts have {num_tensors} tensors together, and should have {wanted}")
