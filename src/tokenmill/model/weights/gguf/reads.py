"""Plan which GGUF tensors fill which target of a decoder, by llama.cpp's names, and undo what its converter changed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.models.gguf_table import UNCHANGED, Change, GgufTable, first_drafting_layer, num_drafting_layers
from tokenmill.model.models.targets import Target
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.packed import Rows, dense, pick_columns, pick_rows
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.gguf.config import ROPE_FACTORS
from tokenmill.model.weights.gguf.file import GgufFile, GgufTensor
from tokenmill.model.weights.gguf.values import read_rows

# What a file has besides weights: the configuration is made of it.
_FACTORS = {ROPE_FACTORS, *(f"rope_factors_{kind}.weight" for kind in ("long", "short"))}

# Bytes of memory for each number of a tensor while it is read.
UNPACKED_BYTES = 8


class GgufRead(msgspec.Struct, frozen=True):
    """One target's values.

    Attributes:
        tensor: the rows that are wanted; of stacked experts, those of one.
        change: the change that was made to them.
        bias: `tensor` is the row of an expert's bias, of which these numbers are wanted.
        columns: the wanted numbers of each of its rows; None: all.
    """

    key: WeightKey
    tensor: GgufTensor
    change: Change = UNCHANGED
    bias: Part | None = None
    columns: Part | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.num_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory that `rows` takes for a moment, unpacked."""
        return UNPACKED_BYTES * math.prod(self.tensor.shape)

    def rows(self) -> Rows:
        """Return the values, floats or quantized."""
        rows = read_rows(self.tensor)
        if self.bias is not None:
            assert isinstance(rows, StoredArray), "biases are floats"
            return rows[0, self.bias.start : self.bias.stop]
        if self.columns is not None:
            rows = pick_columns(rows, range(self.columns.start, self.columns.stop))
        return _undo(self.change, rows)


def plan_gguf_reads(file: GgufFile, targets: Iterable[Target], architecture: Architecture) -> list[GgufRead]:
    """Plan the reads of the targets, in the order of the file.

    Raises:
        InvalidCheckpoint: a tensor is missing, misshapen or has no place.
    """
    table = _table(file, architecture)
    reads = [_read(file, target, architecture, table) for target in targets]
    surplus = file.tensors.keys() - {read.tensor.name for read in reads} - {"output.weight"} - _FACTORS
    surplus = {name for name in surplus if not name.startswith(architecture.other_weights)}
    is_drafting = architecture.draft_head is not None
    surplus = {name for name in surplus if _is_drafting(name, file, first_drafting_layer(file)) == is_drafting}
    if surplus:
        raise InvalidCheckpoint(f"{file.path}: tensor {min(surplus)} has no place in the architecture")
    return sorted((read for read in reads if read.tensor.num_bytes), key=lambda read: read.tensor.begin)


def _table(file: GgufFile, architecture: Architecture) -> GgufTable:
    table = FAMILIES[architecture.name].gguf
    assert table is not None, "the architecture was read from such a file"
    if architecture.draft_head is not None:
        return table.of_drafting_layer(first_drafting_layer(file))
    return table.in_file(file.tensors)


def _read(file: GgufFile, target: Target, architecture: Architecture, table: GgufTable) -> GgufRead:
    expert = target.key.expert
    name = table.name_of(target.key)
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InvalidCheckpoint(f"{file.path} has no tensor {name}, which the architecture calls for")
    if tensor.shape[:1] == (target.part.count,) and _is_apart(target.key.role, architecture, table):
        shape = target.part.count, *target.shape[1:]
        target = msgspec.structs.replace(target, shape=shape, part=Part.whole(target.part.count))
    if expert is None and _is_alike(tensor.shape, target.shape):
        tensor = msgspec.structs.replace(tensor, shape=target.shape)
    fellows = [target.key.role] if expert is None else table.fellows(target.key.role)
    shape = tensor.shape if expert is None else (tensor.shape[1] // len(fellows), *tensor.shape[2:])
    # Of a convolution the input channels, one for each output, are left out.
    if shape != (target.shape[:1] + target.shape[2:] if len(target.shape) == 3 else target.shape):
        raise InvalidCheckpoint(f"{file.path}: tensor {name} has shape {list(shape)}, expected {list(target.shape)}")
    part = target.part
    if expert is not None and target.key.kind == "bias":
        return GgufRead(target.key, tensor.rows(expert, 1), bias=part)
    if expert is not None or not part.is_whole:
        place = (expert or 0) * len(fellows) + fellows.index(target.key.role)
        tensor = tensor.rows(place * part.total + part.start, part.count)
    change = _change_of(target.key, tensor.shape[0], architecture, table)
    if target.columns is None:
        return GgufRead(target.key, tensor, change)
    assert change.columns is None, "a model with states in another order runs in one process"
    span = target.columns.widened(tensor.block)
    own = Part(target.columns.start - span.start, target.columns.count, span.count)
    return GgufRead(target.key, tensor.columns(span), change, columns=None if own.is_whole else own)


def _is_alike(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return True for shapes of the same numbers in one order: a vector as rows, or a dimension of one left out."""
    if len(wanted) == 1:
        return math.prod(stored) == wanted[0]
    return len(wanted) == 2 and [size for size in stored if size > 1] == [size for size in wanted if size > 1]


def _is_apart(role: str, architecture: Architecture, table: GgufTable) -> bool:
    """Return True for a role that shares a tensor with others in checkpoints, and has one of its own in files."""
    names = architecture.weight_names
    others = [other for other, name in names.items() if name == names[role] and other in table.names]
    return len({table.names[other] for other in others}) > 1


def _is_drafting(name: str, file: GgufFile, num_layers: int) -> bool:
    """Return True for a tensor of the layers that draft further tokens, which come behind the model's own."""
    stem, _, rest = name.partition(".")
    layer = rest.partition(".")[0]
    return bool(num_drafting_layers(file)) and stem == "blk" and layer.isdigit() and int(layer) >= num_layers


def _change_of(key: WeightKey, num_rows: int, architecture: Architecture, table: GgufTable) -> Change:
    """Return the change that was made to the rows that a target takes."""
    own = table.change(key, num_rows, architecture)
    if own is not None:
        return own
    # A norm whose weight is an offset is stored with the 1.
    return Change(surplus=1.0) if architecture.norm.is_offset and key.role.endswith("norm") else UNCHANGED


def _undo(change: Change, rows: Rows) -> Rows:
    """Return the values as Hugging Face's checkpoints have them."""
    if change.rows is not None:
        rows = pick_rows(rows, change.rows)
    if change.columns is not None:
        rows = pick_columns(rows, change.columns)
    if change.is_negative_exponential:
        exponentials = -dense(rows).float32().astype(np.float64)
        return StoredArray(np.log(exponentials).astype(np.float32), "F32")
    return StoredArray(dense(rows).float32() - np.float32(change.surplus), "F32") if change.surplus else rows
