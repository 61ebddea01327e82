"""Measure the memory of a model's weights, in the form that its kernels give them, without allocating it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.model.kernels.protocol import NO_PARTS, Experts, Gate, Kernels, LinearWeight, Parts, WeightRole
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


class MeasuringKernels:
    """`Kernels` that make the weights of other kernels without values and add up their sizes.

    Attributes:
        sizes: the bytes of each weight and vector, in the order in which they were made.
    """

    def __init__(self, kernels: Kernels, sizes: list[int] | None = None) -> None:
        self._kernels = kernels.without_memory()
        self.name = kernels.name
        self.dtype = kernels.dtype
        self.maps_tables = kernels.maps_tables
        self.sizes: list[int] = [] if sizes is None else sizes

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights and vectors made so far."""
        return sum(self.sizes)

    def without_memory(self) -> Kernels:
        """Return the wrapped kernels, which allocate nothing."""
        return self._kernels

    def in_memory(self, arena: Arena) -> None:
        """Return None: measured weights have no memory to share."""

    def of_layer(self, index: int) -> MeasuringKernels:
        """Return kernels for the weights of layer `index`, which add to the same sizes."""
        return MeasuringKernels(self._kernels.of_layer(index), self.sizes)

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled weight and record its size."""
        matrix = self._kernels.linear_weight(out_size, in_size, role, parts)
        self.sizes.append(matrix.num_bytes)
        return matrix

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """Make unfilled experts and record the sizes of their matrices and biases."""
        experts = self._kernels.experts(num_experts, hidden_size, size, gate, has_biases)
        self.sizes += [matrix.num_bytes for matrix in (*experts.gate_up, *experts.down)]
        self.sizes += [bias.nbytes for bias in experts.biases or ()]
        return experts

    def vector(self, size: int, is_wide: bool = False) -> Array:
        """Make an unfilled vector and record its size."""
        vector = self._kernels.vector(size, is_wide)
        self.sizes.append(vector.nbytes)
        return vector

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped kernels."""
        return getattr(self._kernels, name)
