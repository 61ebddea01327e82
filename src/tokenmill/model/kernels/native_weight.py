"""Matrices packed for the native kernels: the Python side of native/isa/linear.cpp; see `TorchWeight`, reference.py."""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.operands import (
    as_like,
    bfloat16,
    contiguous,
    empty_like,
    float32,
    in_one_piece,
    is_a,
    stride,
)
from tokenmill.model.kernels.protocol import Gate, WeightRole
from tokenmill.model.quantization.error_costs import EVEN, ErrorCosts
from tokenmill.model.quantization.packed import (
    BLOCK_FORMATS,
    BlockRows,
    Mxfp4Rows,
    PackedFormat,
    QuantizedRows,
    Rows,
    WeightedRows,
    dense,
    powers_of_two,
)
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import HostArrays
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    import torch

    from tokenmill._native import Kernels, Packed
    from tokenmill.platform.arrays import Array

# Rows of a panel.
LANES = 16
GROUP = 32
"""Inputs that share a scale; a checkpoint's groups are taken as they are if they are multiples of it, or whole rows."""


class Element(IntEnum):
    """Element types that the kernels read and write; the numbers are those of native/kernel_table.h."""

    BF16 = 0
    FLOAT32 = 1
    FLOAT16 = 2


# The numbers that llama.cpp and native/packed.h give the kinds of blocks.
BLOCK_NUMBERS = {"Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23}
STORED_ELEMENTS = {"BF16": Element.BF16, "F32": Element.FLOAT32, "F16": Element.FLOAT16}


class PackedWeight:
    """A `LinearWeight` W [out_size, in_size] in panels of 16 rows. Activations are bfloat16, of NumPy or of torch.

    Integer weights are multiplied by int8 activations, which are rounded per 32 inputs of a token;
    model/kernels/reference.py has the arithmetic. The bits of a result depend on its own row of x and on the
    instruction set, not on the number of rows or threads.

    Args:
        kernels: the native kernels that fill and multiply it.
        shape: out_size, in_size.
        role: a GATE_UP matrix is laid out for `gated`, and multiplied in two halves for rows with adapters.
        format: storage format of the weights.
        has_memory: False for a matrix that is only measured.
        arena: memory for its bytes, which holds zeros or the bytes of an equal matrix; None for memory of its own.

    Attributes:
        packed: its shape and the address of its bytes.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, int],
        role: WeightRole = WeightRole.LINEAR,
        format: PackedFormat = PackedFormat.BF16,
        has_memory: bool = True,
        arena: Arena | None = None,
    ) -> None:
        self.shape = shape
        self.role = role
        self._kernels = kernels
        self._is_gated = role is WeightRole.GATE_UP
        self._format = format
        self.packed: Packed = importlib.import_module(MODULE).Packed(format, *shape, self._is_gated)
        self.num_bytes = self.packed.num_bytes
        # The padding has to be zeros: it is multiplied too.
        self._memory: npt.NDArray[np.uint8] | None = None
        if has_memory:
            own = HostArrays().zeros((self.num_bytes,), "uint8") if arena is None else arena.take(self.num_bytes)
            self._memory = own
            self.packed.place(address(self._memory))

    def operand(self, array: Array) -> Array:
        """Return the array: native kernels take addresses."""
        return array

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Pack rows from row `start` on; keep rows already quantized in this format, round all others."""
        assert self._memory is not None, "a weight that is only measured is not filled"
        if not isinstance(rows, StoredArray | QuantizedRows | Mxfp4Rows | BlockRows | WeightedRows):
            from tokenmill.model.kernels.stored_tensors import stored

            rows = stored(rows)
        count, size = rows.shape
        if size != self.shape[1] or start < 0 or start + count > self.shape[0]:
            raise ValueError(f"rows {start} to {start + count} of {size} inputs do not fit a matrix of {self.shape}")
        if isinstance(rows, BlockRows):
            if BLOCK_FORMATS.get(rows.kind) is self._format:
                self._load_blocks(start, rows)
                return
            rows = rows.unpacked()
        if isinstance(rows, Mxfp4Rows) and self._format is PackedFormat.MXFP4:
            self._load_integers(start, _nibbles(rows))
        elif isinstance(rows, QuantizedRows) and self._takes(rows):
            self._load_integers(start, rows)
        else:
            self._load_floats(start, dense(rows), rows.costs if isinstance(rows, WeightedRows) else EVEN)

    def _load_floats(self, start: int, rows: StoredArray, costs: ErrorCosts) -> None:
        if rows.dtype not in STORED_ELEMENTS:
            rows = StoredArray(rows.float32(), "F32")
        values, element = rows.values, STORED_ELEMENTS[rows.dtype]
        stride, rest = divmod(values.strides[0], values.itemsize)
        if rest or values.strides[1] != values.itemsize:
            values, stride = np.ascontiguousarray(values), values.shape[1]
        self._kernels.pack(
            self.packed,
            start,
            values.ctypes.data,
            len(values),
            stride,
            element,
            0 if costs.importance is None else address(costs.importance),
            0 if costs.feedback is None else address(costs.feedback),
            0 if costs.feedback is None else costs.feedback.shape[-1],
        )

    def _load_integers(self, start: int, rows: QuantizedRows) -> None:
        values = np.ascontiguousarray(rows.values)
        scales = np.ascontiguousarray(rows.scales, np.float32)
        offsets = None if rows.offsets is None else np.ascontiguousarray(rows.offsets, np.float32)
        self._kernels.pack_integers(
            self.packed,
            start,
            values.ctypes.data,
            len(values),
            scales.ctypes.data,
            0 if offsets is None else offsets.ctypes.data,
            scales.shape[1],
        )

    def _load_blocks(self, start: int, rows: BlockRows) -> None:
        blocks = np.ascontiguousarray(rows.blocks)
        self._kernels.pack_blocks(self.packed, start, blocks.ctypes.data, len(blocks), BLOCK_NUMBERS[rows.kind])

    def _takes(self, rows: QuantizedRows) -> bool:
        if rows.group_size % GROUP and rows.scales.shape[1] > 1:
            return False
        match self._format:
            case PackedFormat.INT8:
                return rows.bits == 8 and rows.offsets is None
            case PackedFormat.INT4_OFFSET:
                return rows.bits == 4
            case PackedFormat.INT5_OFFSET:
                return rows.bits in (4, 5)
            case PackedFormat.INT4 | PackedFormat.INT5:
                bits = 4 if self._format is PackedFormat.INT4 else 5
                is_centred = rows.offsets is not None and np.array_equal(rows.offsets, -(1 << bits - 1) * rows.scales)
                return rows.bits == bits and is_centred
        return False

    def multiply(self, x: Any, bias: Array | None = None) -> Any:
        """Return x W^T + bias in bfloat16."""
        if self._is_gated:
            return self._halves(x, bias)
        return self._linear(x, (self.shape[0], Element.BF16), bias)

    def _halves(self, x: Any, bias: Array | None) -> Any:
        """Return gate and up side by side, [T, out_size].

        Their panels alternate in memory, and so do the columns of a plain product.
        """
        half = self.shape[0] // 2
        stored = -(-half // LANES) * LANES
        plain: Packed = importlib.import_module(MODULE).Packed(self._format, 2 * stored, self.shape[1], False)
        assert self._memory is not None, "a weight that is only measured is not multiplied"
        plain.place(address(self._memory))
        sums = self._linear(x, (2 * stored, Element.FLOAT32), None, plain)
        pairs = sums.reshape(x.shape[0], stored // LANES, 2, LANES).swapaxes(1, 2).reshape(x.shape[0], 2, stored)
        sums = pairs[:, :, :half].reshape(x.shape[0], 2 * half)
        if bias is not None:
            sums = sums + (as_like(sums, float32(bias)) if isinstance(bias, np.ndarray) else float32(bias))
        return bfloat16(sums)

    def gated(self, x: Any, bias: Array | None = None, gate: Gate = Gate.SILU) -> Any:
        """Return gate(first half) * second half of x W^T + bias in bfloat16."""
        return self._linear(x, (self.shape[0] // 2, Element.BF16), bias, gate=gate)

    def logits(self, x: Any) -> Any:
        """Return x W^T in float32."""
        return self._linear(x, (self.shape[0], Element.FLOAT32), None)

    def argmax(self, x: Any) -> Any:
        """Return the row of the largest logit without storing the logits."""
        x = self._checked(x)
        ids = empty_like(x, (x.shape[0],), "int64")
        self._kernels.argmax(self.packed, address(x), x.shape[0], stride(x), address(ids), 0)
        return ids

    def best(self, x: Any) -> tuple[Any, Any]:
        """Return the row and the value of the largest logit without storing the logits."""
        x = self._checked(x)
        ids, values = empty_like(x, (x.shape[0],), "int64"), empty_like(x, (x.shape[0],), "float32")
        self._kernels.argmax(self.packed, address(x), x.shape[0], stride(x), address(ids), address(values))
        return ids, values

    def lookup(self, ids: Any) -> Any:
        """Return rows by number in bfloat16; the ids are not checked."""
        ids = contiguous(ids)
        out = empty_like(ids, (ids.shape[0], self.shape[1]), "bfloat16")
        self._kernels.lookup(self.packed, address(ids), ids.shape[0], address(out))
        return out

    def _linear(
        self,
        x: Any,
        outputs: tuple[int, Element],
        bias: Array | None,
        packed: Packed | None = None,
        gate: Gate = Gate.SILU,
    ) -> Any:
        x, (columns, element) = self._checked(x), outputs
        out = empty_like(x, (x.shape[0], columns), "float32" if element is Element.FLOAT32 else "bfloat16")
        if bias is not None and not (is_a("bfloat16", bias) and in_one_piece(bias)):
            bias = contiguous(bfloat16(bias))
        self._kernels.linear(
            packed or self.packed,
            address(x),
            x.shape[0],
            stride(x),
            address(out),
            stride(out),
            element,
            0 if bias is None else address(bias),
            gate,
        )
        return out

    def _checked(self, x: Any) -> Any:
        is_on_cpu = isinstance(x, np.ndarray) or x.is_cpu
        if x.shape[1] != self.shape[1] or not is_a("bfloat16", x) or not is_on_cpu:
            raise ValueError(f"a matrix of {self.shape} takes bfloat16 rows on the CPU, not {x.dtype} {tuple(x.shape)}")
        return x if stride(x, 1) == 1 else contiguous(x)


# Half of a scale is stored in 16 bits. Numbers of smaller ones are below 2^-21 and become 0.
_LARGEST_SCALE = 127 + 16


def _nibbles(rows: Mxfp4Rows) -> QuantizedRows:
    """Convert the codes to the kernels' four-bit integers, with halved scales."""
    if int(rows.scales.max()) > _LARGEST_SCALE:
        raise InvalidCheckpoint(f"a group of mxfp4 has the scale 2^{int(rows.scales.max()) - 127}, above 2^16")
    scales = powers_of_two(rows.scales.astype(np.int32) - 128)
    return QuantizedRows(4, rows.codes.reshape(len(rows.blocks), -1), scales)
