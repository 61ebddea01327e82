"""A GGUF file, opened through the gguf package: metadata by key and tensors by name."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.model.weights.stored_part import read_bytes


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor in a file.

    Attributes:
        kind: its type by llama.cpp's name, e.g. `Q4_K`.
        shape: in the usual order, rows first.
        begin: byte in the file.
        is_part: it is the part of a tensor that a rank has.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    is_part: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows of all its matrices together, or of a vector's numbers."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    def rows(self, start: int, count: int) -> GgufTensor:
        """Return some of its rows, which lie side by side."""
        row_bytes = self.num_bytes // self.num_rows
        return dataclasses.replace(
            self,
            shape=(count, *self.shape[-1:]) if len(self.shape) > 1 else (count,),
            begin=self.begin + start * row_bytes,
            num_bytes=count * row_bytes,
            is_part=True,
        )

    def data(self) -> npt.NDArray[np.uint8]:
        """Return its bytes, mapped for as long as the array lives; a part is read instead: a mapping reads ahead."""
        if not self.is_part:
            return np.memmap(self.file, np.uint8, "r", self.begin, (self.num_bytes,))
        data = np.empty(self.num_bytes, np.uint8)
        with self.file.open("rb", buffering=0) as file:
            read_bytes(file.fileno(), data.data, self.begin, self.file)
        return data


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata and tensors of a file; the tensors' data stay where they are."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def floats(self, name: str) -> list[float] | None:
        """Return the numbers of a float32 tensor; None: the file has no such tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else [float(one) for one in tensor.data().view(np.float32)]


def open_gguf(path: Path) -> GgufFile:
    """Read the header.

    Raises:
        InvalidCheckpoint: the gguf package is missing, or the file is truncated or no GGUF.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InvalidCheckpoint(f"{path} needs the gguf package: pip install 'tokenmill[gguf]'") from error
    try:
        open_regular(path).close()
        reader = GGUFReader(path)
        tensors = {
            tensor.name: GgufTensor(
                name=tensor.name,
                file=path,
                kind=tensor.tensor_type.name,
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                begin=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
        return GgufFile(path, {key: field.contents() for key, field in reader.fields.items()}, tensors)
    except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"cannot read {path} as GGUF: {error}") from error
