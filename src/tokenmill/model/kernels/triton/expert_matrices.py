"""One matrix of each expert, stacked for grouped products: in the type of activations, in mxfp4, in 8-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.kernels.fp8 import FP8, Fp8Weight
from tokenmill.model.kernels.protocol import LinearWeight
from tokenmill.model.kernels.torch_kernels import TorchWeight, product
from tokenmill.model.kernels.triton.fp8 import RoundedRows
from tokenmill.model.kernels.triton.matmul import Groups, grouped_multiply
from tokenmill.model.quantization.packed import FP4, Mxfp4Rows, Rows

Shape = tuple[int, int, int]
"""Experts, outputs and inputs."""
# Rows of an expert, on the average, up to which its eight-bit floats are widened: until there its bytes take longer
# than its products (an estimate, see `grouped_multiply`). Above, rows are rounded, as for other layers.
MOST_WIDENED = 64


class ExpertMatrices(Protocol):
    """One matrix of each expert.

    Attributes:
        numbers: [E, ...], as the kernel of grouped products reads them.
    """

    numbers: torch.Tensor

    @property
    def of_each(self) -> Sequence[LinearWeight]:
        """The matrix of each expert, for the caller to fill: views."""

    def multiply(self, x: torch.Tensor, groups: Groups, biases: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows of x by the matrix of their expert; see `grouped_multiply`."""


class PlainMatrices:
    """Matrices in the type of activations, that of `like`."""

    def __init__(self, shape: Shape, like: torch.Tensor) -> None:
        self.numbers = like.new_empty(shape)

    @cached_property
    def of_each(self) -> list[LinearWeight]:
        """The matrix of each expert."""
        return [PlainRows(numbers) for numbers in self.numbers]

    def multiply(self, x: torch.Tensor, groups: Groups, biases: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows of x by the matrix of their expert."""
        return grouped_multiply(x, self.numbers, groups, None, biases)


class PlainRows(TorchWeight):
    """One expert's part of `PlainMatrices`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape[0], weight.shape[1]
        self.weight = weight
        self.num_bytes = weight.nbytes


class Fp8Matrices:
    """Matrices in eight-bit floats with a scale per output, rounded while they are filled.

    Few rows of x are not rounded, many are: by the norm in front or, behind the gate, in a pass of their own. Their
    number alone decides, which a graph is captured for.

    Args:
        rounded: the rows that norms have rounded.
    """

    def __init__(self, shape: Shape, like: torch.Tensor, rounded: RoundedRows) -> None:
        self.numbers = like.new_empty(shape, dtype=FP8)
        self.scales = like.new_empty(*shape[:2], 1, dtype=torch.float32)
        self._rounded = rounded

    @cached_property
    def of_each(self) -> list[LinearWeight]:
        """The matrix of each expert."""
        return [Fp8Rows(*pair) for pair in zip(self.numbers, self.scales, strict=True)]

    def multiply(self, x: torch.Tensor, groups: Groups, biases: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows of x by the matrix of their expert."""
        are_many = len(groups.of_rows) > MOST_WIDENED * len(self.numbers)
        rounded = self._rounded.take(x) if are_many else None
        return grouped_multiply(x, self.numbers, groups, self.scales, biases, rounded)


class Fp8Rows(Fp8Weight):
    """One expert's part of `Fp8Matrices`."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self.shape = weight.shape[0], weight.shape[1]
        self.weight = weight
        self.scales = scales
        self.num_bytes = weight.nbytes + scales.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias with widened weights, for uses without a grouped product."""
        return product(x, (self.weight.float() * self.scales).to(x.dtype), bias)


class Mxfp4Matrices:
    """Matrices in mxfp4, which stay in it."""

    def __init__(self, shape: Shape, like: torch.Tensor) -> None:
        num_experts, outputs, inputs = shape
        self.numbers = like.new_empty(num_experts, outputs, inputs // 2, dtype=torch.uint8)
        self.exponents = like.new_empty(num_experts, outputs, inputs // 32, dtype=torch.uint8)

    @cached_property
    def of_each(self) -> list[LinearWeight]:
        """The matrix of each expert."""
        return [Mxfp4ExpertRows(*pair) for pair in zip(self.numbers, self.exponents, strict=True)]

    def multiply(self, x: torch.Tensor, groups: Groups, biases: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows of x by the matrix of their expert."""
        return grouped_multiply(x, self.numbers, groups, self.exponents, biases)


class Mxfp4ExpertRows(TorchWeight):
    """One expert's part of `Mxfp4Matrices`."""

    def __init__(self, blocks: torch.Tensor, exponents: torch.Tensor) -> None:
        self.shape = blocks.shape[0], 2 * blocks.shape[1]
        self.weight = blocks
        self.num_bytes = blocks.nbytes + exponents.nbytes
        self._exponents = exponents

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Copy mxfp4 rows from row `start` on; refuse rows in any other format."""
        if not isinstance(rows, Mxfp4Rows):
            raise InvalidCheckpoint("experts in mxfp4 are shared by ranks in groups of 32 numbers: take another number")
        own = slice(start, start + rows.shape[0])
        self.weight[own].copy_(torch.from_numpy(rows.blocks).flatten(1))
        self._exponents[own].copy_(torch.from_numpy(rows.scales))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias with dequantized weights, for uses without a grouped product."""
        return product(x, numbers_of(self.weight, self._exponents).to(x.dtype), bias)


def numbers_of(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return mxfp4 as [n, in_size] float32: `Mxfp4Rows.dequantize` on a device.

    Args:
        blocks: [n, in_size / 2] uint8. exponents: [n, in_size / 32] uint8.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(*exponents.shape, 32)
    numbers = torch.tensor(FP4, device=blocks.device)[codes.int()]
    return torch.ldexp(numbers, exponents.int().sub_(127).unsqueeze(-1)).flatten(1)
