"""Read experts that a checkpoint stacks, all those of a layer in one tensor: as floats, or gpt-oss's as mxfp4.

    gate_up_proj           [E, hidden, 2 * size]           inputs by outputs; gate and up take turns (gpt-oss)
    gate_up_proj_blocks    [E, 2 * size, hidden / 32, 16]  see `Mxfp4Rows`
    gate_up_proj_scales    [E, 2 * size, hidden / 32]
    gate_up_proj_bias      [E, 2 * size]
    gate_up_proj           [E, 2 * size, hidden]           outputs by inputs, or the other way round; gate before up

down_proj has the same with `size` inputs and `hidden` outputs. Where experts have no gate (`ExpertStack.are_plain`):

    up                     [E * size, hidden]              outputs by inputs
    down                   [E * size, hidden]              inputs by outputs
"""

from __future__ import annotations

import math
from enum import Enum, auto
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.architecture.mlp_spec import ExpertStack
from tokenmill.model.models.targets import Target
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.layouts import FLOATS
from tokenmill.model.quantization.packed import Mxfp4Rows, Rows, dense
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.shard import Part
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.safetensors_header import StoredTensor
from tokenmill.model.weights.stored_part import read_mapped

# Of the outputs of `gate_up_proj`, those of each role; of `down_proj` all.
_PHASES = {"expert_gate": 0, "expert_up": 1}


class Order(Enum):
    """The order of the numbers of an expert: see the head of this file."""

    TURNS = auto()
    INPUTS_FIRST = auto()
    OUTPUTS_FIRST = auto()


class StackedRead(msgspec.Struct, frozen=True):
    """One target's values, of one expert; see `WeightRead`.

    Attributes:
        stored: by what follows the name of the module: "", "_bias", or "_blocks" and "_scales".
        part, columns: the wanted outputs and inputs; columns None: all.
        has_phases: outputs of gate and up are in one tensor.
    """

    key: WeightKey
    stored: dict[str, StoredTensor]
    part: Part
    columns: Part | None = None
    order: Order = Order.TURNS
    has_phases: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the expert's values."""
        if "" in self.stored:
            inputs, outputs = self.stored[""].shape[1:]
            if self.order is Order.OUTPUTS_FIRST:
                inputs, outputs = outputs, inputs
            return self._own(outputs), inputs
        first = next(iter(self.stored.values()))
        outputs = self._own(first.shape[1])
        return (outputs,) if "_bias" in self.stored else (outputs, 32 * math.prod(first.shape[2:3]))

    @property
    def num_bytes(self) -> int:
        """Bytes in the files that are wanted."""
        share = self._num_phases * next(iter(self.stored.values())).shape[0]
        own = sum(tensor.num_bytes for tensor in self.stored.values()) // share * self.part.count // self.part.total
        return own if self.columns is None else own * self.columns.count // self.columns.total

    @property
    def spare_bytes(self) -> int:
        """Memory that `rows` takes for a moment: an expert's matrix as it is stored, and what is made of it."""
        return 4 * math.prod(self.shape) * self._num_phases

    @property
    def place(self) -> tuple[Path, int]:
        """File and first byte of the first tensor."""
        first = next(iter(self.stored.values()))
        return first.file, first.begin

    def rows(self) -> Rows:
        """Return the values."""
        columns = self.columns
        if columns is None or "" in self.stored:
            return self._rows(slice(None) if columns is None else slice(columns.start, columns.stop))
        if columns.start % 32 == columns.stop % 32 == 0:
            return self._rows(slice(columns.start // 32, columns.stop // 32))
        return dense(self._rows(slice(None)))[:, columns.start : columns.stop]

    def _rows(self, inputs: slice) -> Rows:
        """Return the wanted outputs over some inputs, or groups of 32 of them."""
        expert, own = self.key.expert or 0, slice(self.part.start, self.part.stop)
        phase = _PHASES[self.key.role] if self.has_phases else 0
        is_flipped = self.order is not Order.OUTPUTS_FIRST
        parts = {suffix: _read(tensor, suffix, expert, inputs, is_flipped) for suffix, tensor in self.stored.items()}
        parts = {suffix: self._of_role(tensor, phase)[own] for suffix, tensor in parts.items()}
        if "_blocks" in parts:
            return Mxfp4Rows(*(np.ascontiguousarray(parts[suffix].values) for suffix in _MXFP4))
        (values,) = parts.values()
        return values

    def _of_role(self, outputs: StoredArray, phase: int) -> StoredArray:
        """Return the outputs of gate or of up, or all of them."""
        if self.order is Order.TURNS:
            return outputs[phase :: self._num_phases]
        size = self._own(len(outputs))
        return outputs[phase * size : (phase + 1) * size]

    @property
    def _num_phases(self) -> int:
        return 2 if self.has_phases else 1

    def _own(self, outputs: int) -> int:
        return outputs // self._num_phases


def stacked_name(stack: ExpertStack, key: WeightKey) -> str:
    """Return the name of the tensor that has a weight of an expert."""
    return (stack.gate_up if key.role in _PHASES else stack.down).format(layer=key.layer)


def read_stacked(checkpoint: Checkpoint, target: Target, module: str, takes_turns: bool) -> StackedRead:
    """Plan the read of a weight or a bias of an expert.

    Args:
        module: the name of the tensor, or how the names of its parts begin.
        takes_turns: see `ExpertStack`.

    Raises:
        InvalidCheckpoint: a tensor is missing or misshapen.
    """
    suffixes = ("_bias",) if target.key.kind == "bias" else ("",) if module in checkpoint.tensors else _MXFP4
    stored = {}
    for suffix in suffixes:
        if f"{module}{suffix}" not in checkpoint.tensors:
            raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {module}{suffix}, which config.json calls for")
        stored[suffix] = checkpoint.tensors[f"{module}{suffix}"]
        _check_form(stored[suffix], suffix)
    order = Order.TURNS if takes_turns else _order(stored[suffixes[0]], target)
    read = StackedRead(target.key, stored, target.part, target.columns, order, target.key.role in _PHASES)
    first, last = stored[suffixes[0]], stored[suffixes[-1]]
    if first is not last and first.shape[:-1] != last.shape:
        raise InvalidCheckpoint(f"{last.file}: tensor {last.name} has shape {list(last.shape)}, not that of its blocks")
    if read.shape != target.shape or (target.key.expert or 0) >= first.shape[0]:
        raise InvalidCheckpoint(
            f"{first.file}: tensor {first.name} has shape {list(first.shape)}, config.json calls for experts of "
            f"{list(target.shape)}"
        )
    return read


def read_plain_stack(checkpoint: Checkpoint, target: Target, name: str, num_experts: int) -> StackedRead:
    """Plan the read of a weight of an expert without a gate; see `ExpertStack.are_plain`.

    Raises:
        InvalidCheckpoint: the tensor is missing or misshapen.
    """
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {name}, which config.json calls for")
    is_up = target.key.role == "expert_up"
    size, hidden_size = target.shape if is_up else target.shape[::-1]
    if stored.dtype not in FLOATS or stored.shape != (num_experts * size, hidden_size):
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {name} is {stored.dtype} {list(stored.shape)}, config.json calls for "
            f"{[num_experts * size, hidden_size]}"
        )
    parted = msgspec.structs.replace(stored, shape=(num_experts, size, hidden_size))
    order = Order.OUTPUTS_FIRST if is_up else Order.INPUTS_FIRST
    return StackedRead(target.key, {"": parted}, target.part, target.columns, order)


def _order(stored: StoredTensor, target: Target) -> Order:
    """Return the order that a shape tells of; of squares, the one that transformers saves."""
    outputs, inputs = target.shape
    outputs *= 2 if target.key.role in _PHASES else 1
    return Order.INPUTS_FIRST if stored.shape[1:] == (inputs, outputs) != (outputs, inputs) else Order.OUTPUTS_FIRST


_MXFP4 = ("_blocks", "_scales")
# Dimensions of what is stored, and whether it is bytes.
_FORMS = {"": (3, False), "_bias": (2, False), "_blocks": (4, True), "_scales": (3, True)}


def _check_form(stored: StoredTensor, suffix: str) -> None:
    num_dimensions, is_bytes = _FORMS[suffix]
    is_right = stored.dtype in (("U8",) if is_bytes else FLOATS) and (suffix != "_blocks" or stored.shape[-1:] == (16,))
    if len(stored.shape) != num_dimensions or not is_right:
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {stored.name} is {stored.dtype} {list(stored.shape)}, which is no stack of experts"
        )


def _read(stored: StoredTensor, suffix: str, expert: int, inputs: slice, is_flipped: bool) -> StoredArray:
    """Return [outputs, ...] of one expert, mapped. `is_flipped`: floats are stored inputs by outputs."""
    values = read_mapped(stored)[expert]
    if suffix == "" and is_flipped:
        return StoredArray(values.values[inputs].T, values.dtype)
    return values if suffix == "_bias" else values[:, inputs]
