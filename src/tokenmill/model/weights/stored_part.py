"""Read a part of a stored tensor and no more: the part that a rank has."""

from __future__ import annotations

import math

import torch

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.layouts import Outputs
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.file_part import read_bytes
from tokenmill.model.weights.safetensors_header import StoredTensor

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F64": torch.float64,
    "I64": torch.int64,
}


def part_bytes(stored: StoredTensor, outputs: Outputs | None, part: Part) -> int:
    """Return the bytes that a part of a weight's outputs takes of a tensor; `outputs` None: all, for every part."""
    return stored.num_bytes if outputs is None else stored.num_bytes * part.count // part.total


def read_part(stored: StoredTensor, outputs: Outputs | None, part: Part) -> torch.Tensor:
    """Read the part of a tensor that belongs to some of a weight's outputs, into memory of its own.

    Raises:
        InvalidCheckpoint: the file cannot be read, or a number in it holds outputs of several ranks.
    """
    if stored.dtype not in DTYPES:
        raise InvalidCheckpoint(f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}, which cannot be split")
    dtype, shape = DTYPES[stored.dtype], list(stored.shape)
    start, stop, axis = 0, stored.shape[0] if stored.shape else 1, 0
    if outputs is not None:
        axis, start, stop = outputs.axis, *_numbers(stored, outputs, part)
        shape[axis] = stop - start
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel() == 0:
        return tensor
    row_bytes = stored.num_bytes // max(1, math.prod(stored.shape[: axis + 1]))
    num_runs, run_bytes = math.prod(stored.shape[:axis]), (stop - start) * row_bytes
    stride = stored.num_bytes // num_runs
    begin = stored.data_start + stored.begin + start * row_bytes
    memory = memoryview(tensor.view(torch.uint8).flatten().numpy())
    try:
        with stored.file.open("rb", buffering=0) as file:
            for run in range(num_runs):
                piece = memory[run * run_bytes : (run + 1) * run_bytes]
                read_bytes(file.fileno(), piece, begin + run * stride, stored.file)
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {stored.file}: {error}") from error
    return tensor


def _numbers(stored: StoredTensor, outputs: Outputs, part: Part) -> tuple[int, int]:
    """Return start and end of the numbers along its axis that hold the outputs."""
    size = outputs.per_number
    if part.start % size or part.stop % size:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} packs {size} outputs in a number, which ranks cannot share: a rank "
            f"would have outputs {part.start} to {part.stop} of {part.total}; take another --tensor-parallel-size"
        )
    return part.start // size, part.stop // size
