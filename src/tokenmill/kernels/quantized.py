"""Weights as small integers with scales: the form in which quantized checkpoints meet the kernels."""

from __future__ import annotations

from dataclasses import dataclass
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
