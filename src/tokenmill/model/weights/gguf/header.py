"""The header of a GGUF file: metadata by key and the places of tensors, read from the mapped file.

Scalars are read at once. Of an array only the place is kept, since a vocabulary has a quarter of a million strings; it
is read when its key is asked for. Nothing that the file says is believed before it is checked against its size.
Knows no meaning of any key but the alignment's.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.regular_file import open_regular
from tokenmill.model.vocabulary.mapped_file import native_module
from tokenmill.model.weights.gguf.types import TYPES, TensorType
from tokenmill.model.weights.safetensors_header import POINTER, refuse_pointer

VERSIONS = (2, 3)
# By llama.cpp's numbers of value types; 8 is a string, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4
_COUNT = struct.Struct("<Q")
_KIND = struct.Struct("<I")


class Array(msgspec.Struct, frozen=True):
    """The place of an array in the file."""

    kind: int
    begin: int
    count: int


class TensorPlace(msgspec.Struct, frozen=True):
    """A tensor as the header has it.

    Attributes:
        shape: in the usual order, rows first.
        begin: byte in the file.
    """

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class Metadata(Mapping[str, Any]):
    """The metadata of a file by key; arrays are read, as lists, each time that they are asked for."""

    def __init__(self, data: memoryview, values: Mapping[str, Any]) -> None:
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return _items(self._data, value) if isinstance(value, Array) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def num_items(self, key: str) -> int:
        """Return the length of an array without reading it; 0 for what is absent or no array."""
        value = self._values.get(key)
        return value.count if isinstance(value, Array) else 0


class Header(msgspec.Struct, frozen=True):
    """The metadata of a file and the places of its tensors."""

    metadata: Metadata
    tensors: list[TensorPlace]


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        InvalidCheckpoint: the file cannot be read, is truncated, or is no GGUF file of a version that is known.
    """
    try:
        with open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("the file is empty")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        refuse_pointer(path, bytes(data[: len(POINTER)]))
        return _Reader(data).header()
    except InvalidCheckpoint:
        raise
    except (OSError, ValueError, struct.error, IndexError, OverflowError) as error:
        raise InvalidCheckpoint(f"cannot read {path} as GGUF: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, struct.error | IndexError | OverflowError):
        return "it ends within its header"
    return (error.strerror or "") if isinstance(error, OSError) else str(error)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def header(self) -> Header:
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version:#x}; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        values = {}
        for _ in range(num_keys):
            key = self._string()
            values[key] = self._value(self._number("I"))
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        places = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return Header(Metadata(self._data, values), [self._placed(*place, start) for place in places])

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        text, self._at = _string(self._data, self._at)
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind not in NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self._number(NUMBERS[kind])

    def _array(self) -> Array:
        kind, count = self._number("I"), self._number("Q")
        array = Array(kind, self._at, count)
        if kind in NUMBERS:
            self._at += count * struct.calcsize(NUMBERS[kind])
        elif kind == STRING:
            self._at = _after_strings(self._data, self._at, count)
        else:
            raise ValueError(f"an array has items of the unknown type {kind}")
        if self._at > len(self._data):
            raise IndexError
        return array

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if not 0 < num_dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _placed(self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> TensorPlace:
        kind = TYPES.get(number)
        if kind is None:
            raise ValueError(f"tensor {name} has the unknown type {number}")
        if shape[-1] % kind.block:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} numbers, which are no whole blocks of {kind.name}")
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        if start + offset + num_bytes > len(self._data):
            raise ValueError(f"it ends within tensor {name}")
        return TensorPlace(name, kind, shape, start + offset, num_bytes)


def _string(data: memoryview, at: int) -> tuple[str, int]:
    (length,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    if at + length > len(data):
        raise IndexError
    return str(data[at : at + length], "utf-8", "replace"), at + length


def _after_strings(data: memoryview, at: int, count: int) -> int:
    """Return the byte after `count` strings; an array that is longer than the file ends the walk at the file's end."""
    native = native_module()
    if native is not None:
        return at + int(native.strings_size(*_rest(data, at), count))
    length_at = _COUNT.unpack_from
    for _ in range(count):
        at += 8 + length_at(data, at)[0]
    return at


def _rest(data: memoryview, at: int) -> tuple[int, int]:
    """Return the address and the number of the bytes from `at` on."""
    rest = np.frombuffer(data, np.uint8)[at:]
    return rest.ctypes.data, rest.nbytes


def _items(data: memoryview, array: Array) -> list[Any]:
    if array.kind != STRING:
        return np.frombuffer(data, f"<{NUMBERS[array.kind]}", array.count, array.begin).tolist()
    native = native_module()
    if native is not None:
        strings: list[Any] = native.read_strings(*_rest(data, array.begin), array.count)
        return strings
    found, at, length_at = [], array.begin, _COUNT.unpack_from
    for _ in range(array.count):
        begin = at + 8
        at = begin + length_at(data, at)[0]
        found.append(str(data[begin:at], "utf-8", "replace"))
    return found
