"""The kernels' protocol: all that a decoder asks of a device besides attention.

A set of kernels owns the form of the weights (`Matrix`): row-major tensors in torch, packed panels in native code. So a
model names its operations and never its device, and a new device is a new class here.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch

from tokenmill.kernels.quantized import Rows

if TYPE_CHECKING:
    from tokenmill.kernels.experts import Experts


class MatrixRole(Enum):
    """What a matrix is for; kernels that quantize choose the precision by it."""

    LINEAR = "linear"
    GATED = "gated"  # gate rows, then as many up rows, used through `Matrix.gated` only
    EMBEDDING = "embedding"  # looked up, and the output head where the two are tied
    HEAD = "head"  # the output head: one row per token of the vocabulary
    ROUTER = "router"  # small, and its errors send tokens to other experts


class Matrix(Protocol):
    """A weight W [out_size, in_size] in the form that its kernels like.

    Attributes:
        shape: (out_size, in_size).
        num_bytes: memory it takes.
    """

    shape: tuple[int, int]
    num_bytes: int

    def fill(self, start: int, rows: Rows) -> None:
        """Set rows [start, start + n) to `rows` [n, in_size], on any device."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias: [T, in_size] -> [T, out_size] in x's dtype."""

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """silu(first half) * second half of x W^T + bias: [T, in_size] -> [T, out_size / 2] in x's dtype."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [T, in_size] -> [T, out_size] float32."""

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T] int64: the row of the largest of `logits(x)`; the lowest of equals, a NaN is largest."""

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number: [T] int64 -> [T, in_size] in the model's dtype."""


class Kernels(Protocol):
    """Makes a model's parameters and runs what is not attention.

    Attributes:
        name: e.g. `torch`.
        dtype: of activations, vectors and unquantized matrices.
    """

    name: str
    dtype: torch.dtype

    def matrix(self, out_size: int, in_size: int, role: MatrixRole = MatrixRole.LINEAR) -> Matrix:
        """An unfilled weight."""

    def experts(self, num_experts: int, hidden_size: int, size: int) -> Experts:
        """Unfilled experts of a mixture; `size` is that of their gated middle."""

    def vector(self, size: int) -> torch.Tensor:
        """An unfilled bias or norm weight [size]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, size] normalized over its last dimension, times weight [size]; a new tensor.

        Normalized in float32 and rounded to x's dtype before the product with the weight, as transformers does.
        """

    def add_rms_norm(self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x += update, in place; then the norm of x."""
