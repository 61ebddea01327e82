"""Which stored tensors fill which target: decided, and checked, before any memory is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidCheckpoint
from tokenmill.kernels.quantized import Rows
from tokenmill.models.linear import Target
from tokenmill.weights.checkpoint import Checkpoint
from tokenmill.weights.forms import FLOATS, Dense, Form
from tokenmill.weights.safetensors_header import StoredTensor

# Tables that old checkpoints store although they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
DENSE = Dense()


@dataclass(frozen=True, slots=True)
class Read:
    """One target's values: the tensors that hold them, by suffix, and their form."""

    name: str
    form: Form
    stored: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return sum(tensor.num_bytes for tensor in self.stored.values())

    def rows(self) -> Rows:
        """The values, floats or quantized."""
        return self.form.read({suffix: _tensor(stored) for suffix, stored in self.stored.items()})

    @property
    def place(self) -> tuple[Path, int]:
        """Where the first of the tensors lies; reading in this order runs through the files once."""
        first = next(iter(self.stored.values()))
        return first.file, first.begin


def plan_reads(checkpoint: Checkpoint, targets: Iterable[Target], tied: bool) -> list[Read]:
    """What to read for the targets, in the order of the files.

    Args:
        tied: the output head is the embedding; a stored copy of it is left alone.

    Raises:
        InvalidCheckpoint: anything missing, misshapen or surplus; one sentence with the file and the tensor.
    """
    reads = [_read(checkpoint, target) for target in targets]
    known = {tensor.name for read in reads for tensor in read.stored.values()}
    for name, stored in checkpoint.tensors.items():
        # Left out in silence, a bias or an adapter would make a model that runs and is wrong.
        if name not in known and not DERIVED.fullmatch(name) and not (tied and name == "lm_head.weight"):
            raise InvalidCheckpoint(f"{stored.file}: tensor {name} has no place in the architecture of config.json")
    return sorted(reads, key=lambda read: read.place)


def _read(checkpoint: Checkpoint, target: Target) -> Read:
    form, tensors = checkpoint.quantization.form, checkpoint.tensors
    module = target.name.rpartition(".")[0]
    if target.is_matrix and form.suffixes != DENSE.suffixes and f"{module}.{form.suffixes[-1]}" in tensors:
        read = Read(target.name, form, dict(_parts(checkpoint, module, form)))
        _check_shape(read, target)
        return read
    stored = tensors.get(target.name)
    if stored is None:
        raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {target.name}, which config.json calls for")
    read = Read(target.name, DENSE, {"weight": stored})
    _check_shape(read, target)
    if stored.dtype not in FLOATS:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {target.name} has dtype {stored.dtype}; supported: {', '.join(FLOATS)}"
        )
    return read


def _parts(checkpoint: Checkpoint, module: str, form: Form) -> Iterator[tuple[str, StoredTensor]]:
    for suffix in (*form.suffixes, *form.optional):
        stored = checkpoint.tensors.get(f"{module}.{suffix}")
        if stored is not None:
            yield suffix, stored
        elif suffix in form.suffixes:
            raise InvalidCheckpoint(
                f"{checkpoint.source} has no tensor {module}.{suffix}, which its quantization calls for"
            )


def _tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor, mapped from its file; what has been read of it leaves memory with it.

    The file is opened for each tensor: a mapping that stayed would keep all its pages in memory.
    """
    try:
        with safe_open(stored.file, framework="pt") as file:
            return file.get_tensor(stored.name)
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"cannot read {stored.file}: {error}") from error


def _check_shape(read: Read, target: Target) -> None:
    shape = read.form.shape(read.stored)
    if shape != target.shape:
        stored = next(iter(read.stored.values()))
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} has shape {list(shape)}, config.json calls for {list(target.shape)}"
        )
