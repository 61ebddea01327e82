"""`TritonKernels`: what a decoder computes with on a GPU. Large products are the library's, the rest is Triton."""

from __future__ import annotations

import torch

from tokenmill.kernels.experts import Experts
from tokenmill.kernels.fp8 import ALIGNMENT, Fp8Matrix
from tokenmill.kernels.protocol import MatrixRole
from tokenmill.kernels.torch_kernels import TorchKernels, TorchMatrix
from tokenmill.kernels.triton import matmul, norm
from tokenmill.kernels.triton.experts import StackedExperts
from tokenmill.kernels.triton.gate import silu_mul


class GatedMatrix(TorchMatrix):
    """The gate is one pass over the product."""

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.gated`."""
        return silu_mul(self.multiply(x, bias))


class InvariantMatrix(GatedMatrix):
    """Products whose sums run in one order, whatever the number of rows."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.multiply`."""
        return matmul.multiply(x, self.weight, bias)


class GatedFp8Matrix(Fp8Matrix, GatedMatrix):
    """Eight-bit floats, and the gate in one pass."""


class TritonKernels(TorchKernels):
    """See `Kernels`.

    Args:
        is_invariant: a token's results do not depend on how many others there are.
        fp8: linear layers are quantized to eight-bit floats while they are filled.
    """

    name = "triton"

    def __init__(self, dtype: torch.dtype, device: str, *, is_invariant: bool = False, fp8: bool = False) -> None:
        super().__init__(dtype, device)
        self._is_invariant = is_invariant
        self._fp8 = fp8

    def matrix(self, out_size: int, in_size: int, role: MatrixRole = MatrixRole.LINEAR) -> TorchMatrix:
        """See `Kernels.matrix`."""
        is_aligned = out_size % ALIGNMENT == 0 and in_size % ALIGNMENT == 0
        if self._fp8 and is_aligned and role in (MatrixRole.LINEAR, MatrixRole.GATED):
            return GatedFp8Matrix(out_size, in_size, self._device)
        kind = InvariantMatrix if self._is_invariant else GatedMatrix
        return kind(out_size, in_size, self.dtype, self._device)

    def experts(self, num_experts: int, hidden_size: int, size: int) -> Experts:
        """See `Kernels.experts`; experts are not quantized."""
        return StackedExperts(num_experts, hidden_size, size, self.vector(0))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.add_rms_norm`."""
        return norm.add_rms_norm(x, update, weight, eps)
