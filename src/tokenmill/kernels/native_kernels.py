"""Kernels in C++ for bfloat16 models on CPUs; see native/. Their torch reference is `TorchKernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenmill.kernels import native_ops
from tokenmill.kernels.formats import Formats
from tokenmill.kernels.native_matrix import PackedMatrix
from tokenmill.kernels.protocol import Matrix, MatrixRole
from tokenmill.kernels.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from tokenmill import _native


class NativeKernels(TorchKernels):
    """See `Kernels`. Weights are packed when they are filled; results depend on no other row, bit for bit.

    Attributes:
        formats: how the matrices of each role are stored.
    """

    name = "native"

    def __init__(self, native: _native.Kernels, formats: Formats) -> None:
        super().__init__(torch.bfloat16, "cpu")
        self.native = native
        self.formats = formats

    def matrix(self, out_size: int, in_size: int, role: MatrixRole = MatrixRole.LINEAR) -> Matrix:
        """See `Kernels.matrix`."""
        return PackedMatrix(self.native, (out_size, in_size), role, self.formats[role])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
        return native_ops.rms_norm(self.native, x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.add_rms_norm`."""
        return native_ops.rms_norm(self.native, x, weight, eps, update)
