"""Quantized rows of a weight, which kernels take, and the formats of packed matrices, which they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.quantization.blocks import LAYOUTS, Bytes
from tokenmill.model.quantization.error_costs import ErrorCosts
from tokenmill.model.quantization.stored_array import StoredArray

Numbers = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class QuantizedRows(msgspec.Struct, frozen=True):
    """n rows of a weight: w[i, k] = values[i, k] * scales[i, g] + offsets[i, g], where g is the group that k lies in.

    Groups are equal runs of inputs, in order. Unpacked, one byte a value: they are read, handed over and forgotten.

    Attributes:
        bits: 4, 5 or 8.
        values: [n, in_size]; int8 for 8 bits, uint8 from 0 to 15 or 31 for fewer.
        scales: [n, groups] float32.
        offsets: [n, groups] float32, or None: all 0.
    """

    bits: int
    values: Numbers
    scales: Floats
    offsets: Floats | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Floats:
        """Return the weight as [n, in_size] float32."""
        grouped = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        grouped *= self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.reshape(self.values.shape)


# The numbers of four bits, e2m1, by their code.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Rows(msgspec.Struct, frozen=True):
    """n rows of a weight in the Open Compute Project's MX format of four bits: groups of 32 inputs share an exponent.

    Attributes:
        blocks: [n, groups, 16] uint8, two codes of `FP4` in each, the lower four bits first.
        scales: [n, groups] uint8; a number is multiplied by 2^(scale - 127).
    """

    blocks: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.blocks.shape[0], 32 * self.blocks.shape[1]

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """[n, groups, 32] uint8."""
        return np.stack((self.blocks & 15, self.blocks >> 4), -1).reshape(*self.scales.shape, 32)

    def dequantize(self) -> Floats:
        """Return the weight as [n, in_size] float32."""
        # The largest exponent is infinite, and times zero not a number.
        with np.errstate(over="ignore", invalid="ignore"):
            grouped = np.array(FP4, np.float32)[self.codes]
            grouped *= powers_of_two(self.scales.astype(np.int32) - 127)[:, :, None]
        return grouped.reshape(self.shape)


def powers_of_two(exponents: npt.NDArray[np.int32]) -> Floats:
    """Return 2^exponent in float32, infinite above 127."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1.0), exponents)


class BlockRows(msgspec.Struct, frozen=True):
    """n rows of a weight in llama.cpp's blocks, as a file has them; see blocks.py.

    Attributes:
        kind: name of the blocks' type, of `LAYOUTS`.
        in_size: numbers of a row, whole blocks.
        blocks: [n, bytes of a row] uint8.
    """

    kind: str
    in_size: int
    blocks: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return len(self.blocks), self.in_size

    def unpacked(self) -> QuantizedRows:
        """Return the codes, and the scales and offsets multiplied out."""
        unit_bytes, decode = LAYOUTS[self.kind]
        bits, values, scales, offsets = decode(np.ascontiguousarray(self.blocks).reshape(-1, unit_bytes))
        per_row = len(self.blocks), -1
        return QuantizedRows(
            bits,
            values.reshape(self.shape),
            scales.astype(np.float32, copy=False).reshape(per_row),
            None if offsets is None else offsets.astype(np.float32, copy=False).reshape(per_row),
        )

    def dequantize(self) -> Floats:
        """Return the weight as [n, in_size] float32."""
        return self.unpacked().dequantize()


class WeightedRows(msgspec.Struct, frozen=True):
    """n rows of a weight in floats, and what errors in their numbers cost.

    Attributes:
        values: [n, in_size].
    """

    values: StoredArray
    costs: ErrorCosts

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.values.shape[0], self.values.shape[1]


Rows: TypeAlias = StoredArray | QuantizedRows | Mxfp4Rows | BlockRows | WeightedRows
"""Rows of a weight, [n, in_size]: floats as they are stored, or quantized."""


def pick_rows(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the rows at `index`, in this order."""
    index = list(index)
    match rows:
        case QuantizedRows():
            offsets = None if rows.offsets is None else rows.offsets[index]
            return QuantizedRows(rows.bits, rows.values[index], rows.scales[index], offsets)
        case Mxfp4Rows():
            return Mxfp4Rows(rows.blocks[index], rows.scales[index])
        case BlockRows():
            return BlockRows(rows.kind, rows.in_size, rows.blocks[index])
        case WeightedRows():
            return WeightedRows(rows.values[index], rows.costs)
    return rows[index]


def pick_columns(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the numbers of each row at `index`, in this order; rows stay quantized if whole groups are picked."""
    index = list(index)
    if isinstance(rows, BlockRows):
        rows = rows.unpacked()
    if isinstance(rows, QuantizedRows):
        size, starts = rows.group_size, index[:: rows.group_size]
        if not any(start % size for start in starts) and index == [one + at for one in starts for at in range(size)]:
            groups = [start // size for start in starts]
            offsets = None if rows.offsets is None else rows.offsets[:, groups]
            return QuantizedRows(rows.bits, rows.values[:, index], rows.scales[:, groups], offsets)
    return dense(rows)[:, index]


def dense(rows: Rows) -> StoredArray:
    """Return the rows as floats."""
    match rows:
        case StoredArray():
            return rows
        case WeightedRows():
            return rows.values
    return StoredArray(rows.dequantize(), "F32")


class PackedFormat(IntEnum):
    """The storage format of a packed matrix; the numbers and the bytes are those of native/packed.h."""

    BF16 = 0
    INT8 = 1  # a scale for each 32 inputs of an output
    INT4 = 2  # the same
    INT4_OFFSET = 3  # and an offset
    MXFP4 = 4  # see `Mxfp4Rows`
    INT5 = 5  # as INT4
    Q4_K = 6  # llama.cpp's blocks of these names, in panels: integers times units of 256 inputs are scales and offsets
    Q5_K = 7
    Q6_K = 8  # a scale for each 16 inputs
    IQ4 = 9  # codes of the 16 integers of IQ4_NL, and a scale for each 32 inputs
    INT5_OFFSET = 10  # as INT5, and an offset
    FLOAT32 = 11  # for inputs of float32
    INT8_ROTATED = 12  # of rotated inputs, with a scale for each output


BLOCK_FORMATS: Mapping[str, PackedFormat] = MappingProxyType(
    {
        "Q3_K": PackedFormat.Q6_K,
        "Q4_K": PackedFormat.Q4_K,
        "Q5_K": PackedFormat.Q5_K,
        "Q6_K": PackedFormat.Q6_K,
        "IQ4_NL": PackedFormat.IQ4,
        "IQ4_XS": PackedFormat.IQ4,
    }
)
"""Kinds of `BlockRows` -> the format that takes them as they are, and takes nothing else."""


class PackedFormats(msgspec.Struct, frozen=True):
    """The formats of a model's matrices: those of the layers, and the embedding with the output head.

    A router stays in bfloat16: it is small, and its errors send tokens to other experts.

    Attributes:
        experts: None: as the other matrices of the layers.
        gate_up, down: the two matrices of dense feed-forward blocks; None: as the others.
        by_layer: the formats of each layer, where they differ; empty: they do not.
        parts: role of a projection, or `embedding` or `head` -> its format, where a file has one for each; others are
            those above.
    """

    layers: PackedFormat = PackedFormat.BF16
    vocabulary: PackedFormat = PackedFormat.BF16
    experts: PackedFormat | None = None
    gate_up: PackedFormat | None = None
    down: PackedFormat | None = None
    by_layer: tuple[PackedFormats, ...] = ()
    parts: tuple[tuple[str, PackedFormat], ...] = ()

    def of_layer(self, index: int) -> PackedFormats:
        """Return the formats of layer `index`."""
        return self.by_layer[index] if self.by_layer else self

    def of_part(self, role: str, otherwise: PackedFormat) -> PackedFormat:
        """Return the format of a projection, by its role in a table of names."""
        return dict(self.parts).get(role, otherwise)

    def for_floats(self) -> PackedFormats:
        """Return formats for weights that are changed before they are packed."""
        return (
            msgspec.structs.replace(self, by_layer=(), parts=())
            if self.parts or any(one.parts for one in self.by_layer)
            else self
        )


UNQUANTIZED = PackedFormats()
FLOATS = PackedFormats(PackedFormat.FLOAT32, PackedFormat.FLOAT32)
"""Those of a model in float32."""
# What `--quantization` makes of a model; of int4 where nothing can be measured, or is not yet: see weights/mixture.py.
# Few bits cost most in the head, whose rows are the tokens.
QUANTIZATIONS: Mapping[str, PackedFormats] = MappingProxyType(
    {
        "int8": PackedFormats(PackedFormat.INT8, PackedFormat.INT8),
        "int4": PackedFormats(PackedFormat.INT5, PackedFormat.INT8),
    }
)
ENCODER_INT8 = PackedFormats(PackedFormat.INT8_ROTATED, PackedFormat.INT8, experts=PackedFormat.INT8)
"""`--quantization int8` of an encoder, which has many rows to multiply and few weights to read."""
