"""Read experts that a checkpoint stacks, all those of a layer in one tensor (gpt-oss): as floats, or as mxfp4.

    gate_up_proj           [E, hidden, 2 * size]           inputs by outputs; gate and up take turns
    gate_up_proj_blocks    [E, 2 * size, hidden / 32, 16]  see `Mxfp4Rows`
    gate_up_proj_scales    [E, 2 * size, hidden / 32]
    gate_up_proj_bias      [E, 2 * size]

down_proj has the same with `size` inputs and `hidden` outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
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


@dataclass(frozen=True, slots=True)
class StackedRead:
    """One target's values, of one expert; see `WeightRead`.

    Attributes:
        stored: by what follows the name of the module: "", "_bias", or "_blocks" and "_scales".
        part, columns: the wanted outputs and inputs; columns None: all.
    """

    key: WeightKey
    stored: dict[str, StoredTensor]
    part: Part
    columns: Part | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the expert's values."""
        if "" in self.stored:
            inputs, outputs = self.stored[""].shape[1:]
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
        expert, phase, own = self.key.expert or 0, _PHASES.get(self.key.role, 0), slice(self.part.start, self.part.stop)
        parts = {suffix: _read(tensor, suffix, expert, inputs) for suffix, tensor in self.stored.items()}
        parts = {suffix: tensor[phase :: self._num_phases][own] for suffix, tensor in parts.items()}
        if "_blocks" in parts:
            return Mxfp4Rows(*(np.ascontiguousarray(parts[suffix].values) for suffix in _MXFP4))
        (values,) = parts.values()
        return values

    @property
    def _num_phases(self) -> int:
        return 2 if self.key.role in _PHASES else 1

    def _own(self, outputs: int) -> int:
        return outputs // self._num_phases


def read_stacked(checkpoint: Checkpoint, target: Target) -> StackedRead:
    """Plan the read of a weight or a bias of an expert.

    Raises:
        InvalidCheckpoint: a tensor is missing or misshapen.
    """
    module = target.name.rpartition(".")[0]
    suffixes = ("_bias",) if target.key.kind == "bias" else ("",) if module in checkpoint.tensors else _MXFP4
    stored = {}
    for suffix in suffixes:
        if f"{module}{suffix}" not in checkpoint.tensors:
            raise InvalidCheckpoint(f"{checkpoint.source} has no tensor {module}{suffix}, which config.json calls for")
        stored[suffix] = checkpoint.tensors[f"{module}{suffix}"]
        _check_form(stored[suffix], suffix)
    read = StackedRead(target.key, stored, target.part, target.columns)
    first, last = stored[suffixes[0]], stored[suffixes[-1]]
    if first is not last and first.shape[:-1] != last.shape:
        raise InvalidCheckpoint(f"{last.file}: tensor {last.name} has shape {list(last.shape)}, not that of its blocks")
    if read.shape != target.shape or (target.key.expert or 0) >= first.shape[0]:
        raise InvalidCheckpoint(
            f"{first.file}: tensor {first.name} has shape {list(first.shape)}, config.json calls for experts of "
            f"{list(target.shape)}"
        )
    return read


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


def _read(stored: StoredTensor, suffix: str, expert: int, inputs: slice) -> StoredArray:
    """Return [outputs, ...] of one expert, mapped."""
    values = read_mapped(stored)[expert]
    if suffix == "":
        return StoredArray(values.values[inputs].T, values.dtype)
    return values if suffix == "_bias" else values[:, inputs]
