"""Plan which stored tensors fill which target: decided, and checked, before any memory is taken."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.models.targets import Target
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.layouts import FLOATS, Axis, Dense, Inputs, WeightLayout
from tokenmill.model.quantization.packed import Rows, pick_columns
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.checkpoint import Checkpoint, with_plain_names
from tokenmill.model.weights.safetensors_header import StoredTensor
from tokenmill.model.weights.stacked_experts import StackedRead, read_plain_stack, read_stacked, stacked_name
from tokenmill.model.weights.stored_part import part_bytes, read_mapped, read_part

# Tables that old checkpoints store although they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
DENSE = Dense()
# Bytes of memory for each number while integers are unpacked: a word each, then bytes, twice over.
UNPACKED_BYTES = 8
# Of quantized weights: suffixes of tensors that hold floats; the others hold integers, or words of several.
SCALES = ("scales", "weight_scale")
INTEGERS = ("I8", "I32", "I64")


class Read(msgspec.Struct, frozen=True):
    """One target's values: the tensors that hold them, by suffix, their layout, and which of its rows are wanted.

    Attributes:
        columns: the wanted numbers of these rows; None: all.
    """

    key: WeightKey
    layout: WeightLayout
    stored: dict[str, StoredTensor]
    part: Part
    columns: Part | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.layout.shape({suffix: tensor.shape for suffix, tensor in self.stored.items()})

    @property
    def num_bytes(self) -> int:
        """Bytes in the files that are wanted."""
        part = self.part if self.columns is None else self._span(self.columns)
        return sum(part_bytes(tensor, self._axis(suffix), part) for suffix, tensor in self.stored.items())

    @property
    def spare_bytes(self) -> int:
        """Memory that `rows` takes for a moment: floats are used where the file is mapped, integers are unpacked."""
        if self.layout is DENSE:
            return 0 if self.part.is_whole and self.columns is None else self.num_bytes
        part = self.part if self.columns is None else self._span(self.columns)
        return UNPACKED_BYTES * math.prod(self.shape) * part.count // part.total

    def rows(self) -> Rows:
        """Return the values, floats or quantized. Of a part nothing else is read: no mapping, which reads ahead."""
        if self.columns is not None:
            span = self._span(self.columns)
            inputs, start = Inputs(range(span.start, span.stop), span.total), self.columns.start - span.start
            rows, is_exact = self.layout.read(self._read_parts(span), inputs), span.count == self.columns.count
            return rows if is_exact else pick_columns(rows, range(start, start + self.columns.count))
        if self.part.is_whole:
            return self.layout.read({suffix: read_mapped(stored) for suffix, stored in self.stored.items()})
        return self.layout.read(self._read_parts(self.part))

    def _read_parts(self, part: Part) -> dict[str, StoredArray]:
        return {suffix: read_part(stored, self._axis(suffix), part) for suffix, stored in self.stored.items()}

    def _axis(self, suffix: str) -> Axis | None:
        """Return the axis that parts are parts of."""
        return self.layout.outputs(suffix) if self.columns is None else self.layout.inputs(suffix)

    def _span(self, columns: Part) -> Part:
        """Return the whole numbers of the file that hold these columns."""
        size = max(axis.per_number for axis in map(self.layout.inputs, self.stored) if axis is not None)
        return columns.widened(size)

    @property
    def place(self) -> tuple[Path, int]:
        """File and first byte of the first tensor; reading in this order runs through the files once."""
        first = next(iter(self.stored.values()))
        return first.file, first.begin


def plan_reads(
    checkpoint: Checkpoint, targets: Iterable[Target], architecture: Architecture
) -> list[Read | StackedRead]:
    """Plan the reads of the targets, in the order of the files.

    A stored copy of an output head that is the embedding is left alone.

    Raises:
        InvalidCheckpoint: anything missing, misshapen or surplus; one sentence with the file and the tensor.
    """
    checkpoint = with_plain_names(checkpoint, architecture)
    reads = [_find(checkpoint, target, architecture) for target in targets]
    known = {tensor.name for read in reads for tensor in read.stored.values()}
    if architecture.tie_embeddings and architecture.has_head:
        known.add(WeightKey("head").name(architecture.weight_names))
    for name, stored in checkpoint.tensors.items():
        # Left out in silence, a bias or an adapter would make a model that runs and is wrong.
        if name.startswith(architecture.other_weights):
            continue  # a vision tower's reader knows them all
        if stored.name not in known and not DERIVED.fullmatch(name):
            raise InvalidCheckpoint(f"{stored.file}: tensor {name} has no place in the architecture of config.json")
    return sorted((read for read in reads if read.part.count), key=lambda read: read.place)


def _find(checkpoint: Checkpoint, target: Target, architecture: Architecture) -> Read | StackedRead:
    stack = architecture.expert_stack
    if stack is not None and target.key.expert is not None:
        name = stacked_name(stack, target.key)
        # Of stacks that experts of their own names may stand for, these are read where they are stored.
        if stack.are_plain:
            return read_plain_stack(checkpoint, target, name, _num_experts(architecture, target))
        if stack.takes_turns or name in checkpoint.tensors:
            return read_stacked(checkpoint, target, name, stack.takes_turns)
    return _read(checkpoint, target)


def _num_experts(architecture: Architecture, target: Target) -> int:
    assert target.key.layer is not None, "experts are those of a layer"
    block = architecture.layers[target.key.layer].mlp
    assert isinstance(block, MoeSpec), "and the layer has some"
    return block.num_experts


def _read(checkpoint: Checkpoint, target: Target) -> Read:
    assert target.columns is None or target.part.is_whole, "ranks share rows or columns of a matrix"
    layout, tensors = checkpoint.scheme.layout, checkpoint.tensors
    module = target.name.rpartition(".")[0]
    if target.is_matrix and layout.suffixes != DENSE.suffixes and f"{module}.{layout.suffixes[-1]}" in tensors:
        read = Read(target.key, layout, dict(_parts(checkpoint, module, layout)), target.part, target.columns)
        _check_shape(read, target)
        for suffix, part in read.stored.items():
            _check_dtype(part, FLOATS if suffix in SCALES else INTEGERS)
        return read
    stored = tensors.get(target.name)
    if stored is None:
        raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {target.name}, which config.json calls for")
    read = Read(target.key, DENSE, {"weight": stored}, target.part, target.columns)
    _check_shape(read, target)
    _check_dtype(stored, FLOATS)
    return read


def _check_dtype(stored: StoredTensor, supported: Sequence[str]) -> None:
    if stored.dtype not in supported:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported: {', '.join(supported)}"
        )


def _parts(checkpoint: Checkpoint, module: str, layout: WeightLayout) -> Iterator[tuple[str, StoredTensor]]:
    for suffix in (*layout.suffixes, *layout.optional):
        stored = checkpoint.tensors.get(f"{module}.{suffix}")
        if stored is not None:
            yield suffix, stored
        elif suffix in layout.suffixes:
            raise InvalidCheckpoint(
                f"{checkpoint.source} has no tensor {module}.{suffix}, which its quantization calls for"
            )


def _check_shape(read: Read, target: Target) -> None:
    shape = read.shape
    if shape != target.shape:
        stored = next(iter(read.stored.values()))
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} has shape {list(shape)}, config.json calls for {list(target.shape)}"
        )
