"""What kernels take and hold: quantized rows of a weight, and the formats of packed matrices."""

from __future__ import annotations

from collections.abc import Mapping
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
        bits: 4 or 8.
        values: [n, in_size]; int8 for 8 bits, uint8 from 0 to 15 for 4 bits.
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
        """[n, in_size] float32."""
        grouped = self.values.view(*self.scales.shape, -1).float() * self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.view(self.values.shape)


Rows: TypeAlias = torch.Tensor | QuantizedRows
"""Rows of a weight, [n, in_size]: floats of any dtype, or quantized."""


def dense(rows: Rows) -> torch.Tensor:
    """As floats."""
    return rows.dequantize() if isinstance(rows, QuantizedRows) else rows


class PackedFormat(IntEnum):
    """How a packed matrix is stored; the numbers and the bytes are those of native/packed.h."""

    BF16 = 0
    INT8 = 1  # a scale for each output
    INT4 = 2  # a scale for each 32 inputs of an output
    INT4_OFFSET = 3  # and an offset


@dataclass(frozen=True, slots=True)
class PackedFormats:
    """The formats of a model's matrices: those of the layers, and the embedding with the output head.

    A router stays in bfloat16: it is small, and its errors send tokens to other experts.
    """

    layers: PackedFormat = PackedFormat.BF16
    vocabulary: PackedFormat = PackedFormat.BF16


UNQUANTIZED = PackedFormats()
# What `--quantization` makes of a model. Four bits cost too much quality in the head, whose rows are the tokens.
QUANTIZATIONS: Mapping[str, PackedFormats] = MappingProxyType(
    {
        "int8": PackedFormats(PackedFormat.INT8, PackedFormat.INT8),
        "int4": PackedFormats(PackedFormat.INT4, PackedFormat.INT8),
    }
)
