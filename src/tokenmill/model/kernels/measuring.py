"""How much memory a model's weights take in the form that its kernels give them, found out without taking any."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.model.kernels.protocol import Experts, Gate, Kernels, LinearWeight, WeightRole
from tokenmill.platform.memory import Arena


class MeasuringKernels:
    """See `Kernels`: makes the same weights as other kernels, on no device, and adds up what they would take.

    Attributes:
        sizes: the bytes of each weight and vector, in the order in which they were made.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels.without_memory()
        self.name = kernels.name
        self.dtype = kernels.dtype
        self.sizes: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Of all that has been made."""
        return sum(self.sizes)

    def without_memory(self) -> Kernels:
        """See `Kernels.without_memory`."""
        return self._kernels

    def in_memory(self, arena: Arena) -> None:
        """See `Kernels.in_memory`."""

    def linear_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        """See `Kernels.linear_weight`."""
        matrix = self._kernels.linear_weight(out_size, in_size, role)
        self.sizes.append(matrix.num_bytes)
        return matrix

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """See `Kernels.experts`."""
        experts = self._kernels.experts(num_experts, hidden_size, size, gate, has_biases)
        self.sizes += [matrix.num_bytes for matrix in (*experts.gate_up, *experts.down)]
        self.sizes += [bias.nbytes for bias in experts.biases or ()]
        return experts

    def vector(self, size: int) -> torch.Tensor:
        """See `Kernels.vector`."""
        vector = self._kernels.vector(size)
        self.sizes.append(vector.nbytes)
        return vector

    def __getattr__(self, name: str) -> Any:
        """What computes is that of the other kernels."""
        return getattr(self._kernels, name)
