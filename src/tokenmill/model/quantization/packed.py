"""Quantized rows of a weight, which kernels take, and the formats of packed matrices, which they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """n rows of a weight: w[i, k] = values[i, k] * scales[i, g] + offsets[i, g], where g is the group that k lies in.

    Groups are equal runs of inputs, in order. Unpacked, one byte a value: they are read, handed over and forgotten.

    Attributes:
        bits: 4, 5 or 8.
        values: [n, in_size]; int8 for 8 bits, uint8 from 0 to 15 or 31 for fewer.
        scales: [n, groups] float32.
        offsets: [n, groups] float32, or None: all 0.
    """

    bits: int
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return the weight as [n, in_size] float32."""
        grouped = self.values.view(*self.scales.shape, -1).float() * self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.view(self.values.shape)


# The numbers of four bits, e2m1, by their code.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Rows:
    """n rows of a weight in the Open Compute Project's MX format of four bits: groups of 32 inputs share an exponent.

    Attributes:
        blocks: [n, groups, 16] uint8, two codes of `FP4` in each, the lower four bits first.
        scales: [n, groups] uint8; a number is multiplied by 2^(scale - 127).
    """

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.blocks.shape[0], 32 * self.blocks.shape[1]

    @property
    def codes(self) -> torch.Tensor:
        """[n, groups, 32] uint8."""
        return torch.stack((self.blocks & 15, self.blocks >> 4), -1).flatten(2)

    def dequantize(self) -> torch.Tensor:
        """Return the weight as [n, in_size] float32."""
        exponents = self.scales.int().sub_(127).unsqueeze(-1)
        numbers = torch.tensor(FP4, device=self.blocks.device)[self.codes.int()]
        return torch.ldexp(numbers, exponents).view(self.shape)


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """n rows of a weight in floats, and how much the square of an error in each input's numbers weighs.

    Attributes:
        values: [n, in_size], of any dtype.
        importance: [in_size] float32, above 0.
    """

    values: torch.Tensor
    importance: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, in_size)."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return the floats."""
        return self.values


Rows: TypeAlias = torch.Tensor | QuantizedRows | Mxfp4Rows | WeightedRows
"""Rows of a weight, [n, in_size]: floats of any dtype, or quantized."""


def pick_rows(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the rows at `index`, in this order."""
    index = list(index)
    match rows:
        case QuantizedRows():
            offsets = None if rows.offsets is None else rows.offsets[index]
            return QuantizedRows(rows.bits, rows.values[index], rows.scales[index], offsets)
        case Mxfp4Rows():
            return Mxfp4Rows(rows.blocks[index], rows.scales[index])
        case WeightedRows():
            return WeightedRows(rows.values[index], rows.importance)
    return rows[index]


def pick_columns(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the numbers of each row at `index`, in this order; rows stay quantized if whole groups are picked."""
    index = list(index)
    if isinstance(rows, QuantizedRows):
        size, starts = rows.group_size, index[:: rows.group_size]
        if not any(start % size for start in starts) and index == [one + at for one in starts for at in range(size)]:
            groups = [start // size for start in starts]
            offsets = None if rows.offsets is None else rows.offsets[:, groups]
            return QuantizedRows(rows.bits, rows.values[:, index], rows.scales[:, groups], offsets)
    return dense(rows)[:, index]


def dense(rows: Rows) -> torch.Tensor:
    """Return the rows as floats."""
    return rows if isinstance(rows, torch.Tensor) else rows.dequantize()


class PackedFormat(IntEnum):
    """The storage format of a packed matrix; the numbers and the bytes are those of native/packed.h."""

    BF16 = 0
    INT8 = 1  # a scale for each 32 inputs of an output
    INT4 = 2  # the same
    INT4_OFFSET = 3  # and an offset
    MXFP4 = 4  # see `Mxfp4Rows`
    INT5 = 5  # as INT4


@dataclass(frozen=True, slots=True)
class PackedFormats:
    """The formats of a model's matrices: those of the layers, and the embedding with the output head.

    A router stays in bfloat16: it is small, and its errors send tokens to other experts.

    Attributes:
        experts: None: as the other matrices of the layers.
        gate_up, down: the two matrices of dense feed-forward blocks; None: as the others.
        by_layer: the formats of each layer, where they differ; empty: they do not.
    """

    layers: PackedFormat = PackedFormat.BF16
    vocabulary: PackedFormat = PackedFormat.BF16
    experts: PackedFormat | None = None
    gate_up: PackedFormat | None = None
    down: PackedFormat | None = None
    by_layer: tuple[PackedFormats, ...] = ()

    def of_layer(self, index: int) -> PackedFormats:
        """Return the formats of layer `index`."""
        return self.by_layer[index] if self.by_layer else self


UNQUANTIZED = PackedFormats()
# What `--quantization` makes of a model; of int4 where nothing can be measured, or is not yet: see weights/mixture.py.
# Few bits cost most in the head, whose rows are the tokens.
QUANTIZATIONS: Mapping[str, PackedFormats] = MappingProxyType(
    {
        "int8": PackedFormats(PackedFormat.INT8, PackedFormat.INT8),
        "int4": PackedFormats(PackedFormat.INT5, PackedFormat.INT8),
    }
)
