"""Read and check the header of a safetensors file, without reading its tensors.

A file is an 8-byte little-endian length, a JSON object of that length and the data; the object maps each tensor's
name to its dtype, shape and `data_offsets` (https://github.com/huggingface/safetensors). Knows no torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular

# The beginning of what a clone without Git LFS has in place of a large file.
POINTER = b"version https://git-lfs"
# The limit of the format's own reader: a longer header is an attack or garbage.
MAX_HEADER_BYTES = 100_000_000

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F64", "I64", "U64"), 64),
}


class StoredTensor(msgspec.Struct, frozen=True):
    """The place of a tensor in a file.

    Attributes:
        dtype: its type by safetensors' name, e.g. `BF16`.
        begin, end: bytes within the file's data.
        data_start: byte of the file where its data begin.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    data_start: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin


def refuse_pointer(path: Path, begin: bytes | bytearray) -> None:
    """Check that a file is not the pointer to itself that Git LFS keeps; `begin`: its first bytes, 8 at least.

    Raises:
        InvalidCheckpoint: it is.
    """
    if len(begin) >= 8 and begin[: len(POINTER)] == POINTER[: len(begin)]:
        raise InvalidCheckpoint(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, each checked to lie inside it.

    Raises:
        InvalidCheckpoint: the file is missing, truncated or no safetensors; names the file and, if it can, the tensor.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(8), size)
            return _tensors(path, file.read(length), size)
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error


def parse_header(data: bytes | bytearray, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file that is in memory; see `read_header`.

    Args:
        path: of the file, to be named.
    """
    length = _header_length(path, data[:8], len(data))
    return _tensors(path, data[8 : 8 + length], len(data))


def _header_length(path: Path, begin: bytes | bytearray, size: int) -> int:
    refuse_pointer(path, begin)
    length = int.from_bytes(begin, "little")
    if size < 8 or length > MAX_HEADER_BYTES:
        raise InvalidCheckpoint(f"{path} is not a safetensors file")
    if 8 + length > size:
        raise InvalidCheckpoint(f"{path} is truncated: its header takes {8 + length} bytes, the file has {size}")
    return length


def _tensors(path: Path, text: bytes | bytearray, size: int) -> dict[str, StoredTensor]:
    """Return the tensors that a header names, of a file of this size."""
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not a safetensors file: its header is not a JSON object") from error
    header.pop("__metadata__", None)
    data_start = 8 + len(text)
    tensors = {name: _tensor(name, entry, path, data_start) for name, entry in header.items()}
    _check_extent(path, tensors, size - data_start)
    return tensors


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _tensor(name: str, raw: object, path: Path, data_start: int) -> StoredTensor:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{path}: the header's entry for tensor {name} is malformed: {error}") from error
    begin, end = entry.data_offsets
    bits = BITS.get(entry.dtype)
    # A dtype this table lacks is refused later, if the model wants the tensor at all.
    right_size = bits is None or 8 * (end - begin) == math.prod(entry.shape) * bits
    if begin < 0 or end < begin or min(entry.shape, default=0) < 0 or not right_size:
        raise InvalidCheckpoint(
            f"{path}: tensor {name} of shape {entry.shape} and dtype {entry.dtype} cannot lie at bytes {begin} to {end}"
        )
    return StoredTensor(name, path, entry.dtype, tuple(entry.shape), begin, end, data_start)


def _check_extent(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    last = max(tensors.values(), key=lambda tensor: tensor.end, default=None)
    if last is not None and last.end > data_bytes:
        raise InvalidCheckpoint(
            f"{path} is truncated: tensor {last.name} ends at byte {last.end} of the data, the file has {data_bytes}"
        )
