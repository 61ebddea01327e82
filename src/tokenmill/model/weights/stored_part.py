"""Read a stored tensor: all of it, mapped, or a part and no more, the part that a rank has. Knows no torch."""

from __future__ import annotations

import math

import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.layouts import Axis
from tokenmill.model.quantization.stored_array import TYPES, StoredArray
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.file_part import read_bytes
from tokenmill.model.weights.safetensors_header import StoredTensor


def part_bytes(stored: StoredTensor, axis: Axis | None, part: Part) -> int:
    """Return the bytes that a part of a weight takes of a tensor; `axis` None: all, for every part."""
    return stored.num_bytes if axis is None else stored.num_bytes * part.count // part.total


def read_part(stored: StoredTensor, axis: Axis | None, part: Part) -> StoredArray:
    """Read the part of a tensor that belongs to some of a weight's outputs, or inputs, into memory of its own.

    Raises:
        InvalidCheckpoint: the file cannot be read, or a number in it holds outputs of several ranks.
    """
    if stored.dtype not in TYPES:
        raise InvalidCheckpoint(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}, which cannot be split")
    shape = list(stored.shape)
    start, stop, index = 0, stored.shape[0] if stored.shape else 1, 0
    if axis is not None:
        index, start, stop = axis.index, *_numbers(stored, axis, part)
        shape[index] = stop - start
    values = np.empty(shape, TYPES[stored.dtype])
    if values.size == 0:
        return StoredArray(values, stored.dtype)
    row_bytes = stored.num_bytes // max(1, math.prod(stored.shape[: index + 1]))
    num_runs, run_bytes = math.prod(stored.shape[:index]), (stop - start) * row_bytes
    stride = stored.num_bytes // num_runs
    begin = stored.data_start + stored.begin + start * row_bytes
    memory = values.reshape(-1).view(np.uint8).data
    try:
        with stored.file.open("rb", buffering=0) as file:
            for run in range(num_runs):
                piece = memory[run * run_bytes : (run + 1) * run_bytes]
                read_bytes(file.fileno(), piece, begin + run * stride, stored.file)
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {stored.file}: {error}") from error
    return StoredArray(values, stored.dtype)


def read_mapped(stored: StoredTensor) -> StoredArray:
    """Return a tensor mapped from its file, private if it is written; what has been read leaves memory with it.

    Each tensor has a mapping of its own: one of the whole file, that stayed, would keep all its pages in memory.

    Raises:
        InvalidCheckpoint: the file cannot be read, or ends before; or the numbers' type is not supported.
    """
    if stored.dtype not in TYPES:
        raise InvalidCheckpoint(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}, which is not supported")
    if stored.num_bytes == 0:
        return StoredArray(np.empty(stored.shape, TYPES[stored.dtype]), stored.dtype)
    try:
        data = np.memmap(stored.file, np.uint8, "c", stored.data_start + stored.begin, (stored.num_bytes,))
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"cannot read {stored.file}: {error}") from error
    return StoredArray.of_bytes(np.asarray(data), stored.dtype, stored.shape)


def _numbers(stored: StoredTensor, axis: Axis, part: Part) -> tuple[int, int]:
    """Return start and end of the numbers along its axis that hold the outputs."""
    size = axis.per_number
    if part.start % size or part.stop % size:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} packs {size} outputs in a number, which ranks cannot share: a rank "
            f"would have outputs {part.start} to {part.stop} of {part.total}; take another --tensor-parallel-size"
        )
    return part.start // size, part.stop // size
