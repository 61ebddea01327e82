"""Kernels in plain torch, for any device and dtype: the reference of the others."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.kernels.experts import Experts, LoopedExperts
from tokenmill.kernels.protocol import Matrix, MatrixRole
from tokenmill.kernels.quantized import Rows, dense

# Below these row counts the CPU libraries of torch take other code paths, whose sums round differently; padded up to
# them, a token's result hardly ever depends on who shares its batch (measured: MKL, one thread: never; oneDNN: rarely).
FEWEST_ROWS = {torch.float32: 8, torch.bfloat16: 4}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: [T, in_size] -> [T, out_size]; on a CPU, the same code whether T is 1 or more."""
    missing = FEWEST_ROWS.get(x.dtype, 0) - x.shape[0] if x.is_cpu else 0
    if missing <= 0:
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * size] -> silu(first half) * second half, [T, size]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] over its last dimension, times weight [size]; see `Kernels.rms_norm`."""
    return functional.rms_norm(x, weight.shape, None, eps).mul_(weight)


class TorchMatrix:
    """A row-major weight; see `Matrix`.

    Attributes:
        weight: [out_size, in_size].
    """

    __slots__ = ("num_bytes", "shape", "weight")

    def __init__(self, out_size: int, in_size: int, dtype: torch.dtype, device: str) -> None:
        self.shape = out_size, in_size
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.num_bytes = self.weight.nbytes

    def fill(self, start: int, rows: Rows) -> None:
        """See `Matrix.fill`; quantized rows are spelled out."""
        self.weight[start : start + rows.shape[0]].copy_(dense(rows))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.multiply`."""
        return product(x, self.weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Matrix.gated`."""
        return silu_mul(self.multiply(x, bias))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matrix.logits`."""
        return self.multiply(x).float()

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matrix.argmax`."""
        return self.multiply(x).argmax(-1)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Matrix.lookup`."""
        return functional.embedding(ids, self.weight)


class TorchKernels:
    """See `Kernels`. Device `meta` allocates nothing and serves to ask a model for its `targets`."""

    name = "torch"

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self._device = device

    def matrix(self, out_size: int, in_size: int, role: MatrixRole = MatrixRole.LINEAR) -> Matrix:
        """See `Kernels.matrix`."""
        return TorchMatrix(out_size, in_size, self.dtype, self._device)

    def experts(self, num_experts: int, hidden_size: int, size: int) -> Experts:
        """See `Kernels.experts`."""
        gate_up = [self.matrix(2 * size, hidden_size, MatrixRole.GATED) for _ in range(num_experts)]
        return LoopedExperts(gate_up, [self.matrix(hidden_size, size) for _ in range(num_experts)])

    def vector(self, size: int) -> torch.Tensor:
        """See `Kernels.vector`."""
        return torch.empty(size, dtype=self.dtype, device=self._device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.add_rms_norm`."""
        x += update
        return rms_norm(x, weight, eps)
