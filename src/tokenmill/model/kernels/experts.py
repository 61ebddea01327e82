"""The experts of a mixture as weights of their kernels, and the loop that runs them one after the other.

Imports no torch; the loop runs on tensors, by their methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tokenmill.model.kernels.protocol import (
    NO_PARTS,
    Activation,
    ExpertBiases,
    Experts,
    Gate,
    Kernels,
    LinearWeight,
    Parts,
    WeightRole,
)

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import Array


class ExpertMaker(Protocol):
    """The part of `Kernels` that makes experts with one weight per matrix, for kernels to inherit."""

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """Make unfilled experts with one weight per matrix."""
        gate_up = [self._expert_weight(2 * size, hidden_size, WeightRole.GATE_UP) for _ in range(num_experts)]
        down = [self._expert_weight(hidden_size, size) for _ in range(num_experts)]
        biases = self._biases(num_experts, hidden_size, size) if has_biases else None
        return self._mixture(gate_up, down, gate, biases)

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled weight."""

    def vector(self, size: int) -> Array:
        """Make an unfilled vector."""

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return LoopedExperts(gate_up, down, gate, biases)

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        return self.linear_weight(out_size, in_size, role)

    def _biases(self, num_experts: int, hidden_size: int, size: int) -> ExpertBiases:
        first, second = (self.vector(num_experts * own).reshape(num_experts, own) for own in (2 * size, hidden_size))
        return first, second


class LoopedExperts:
    """Experts that run one after the other, each a product of its own: for kernels without grouped products."""

    __slots__ = ("biases", "down", "gate", "gate_up")

    def __init__(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.biases = biases
        self.gate = gate

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run x through one expert."""
        first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
        return self.down[expert].multiply(self.gate_up[expert].gated(x, first, self.gate), second)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, one expert after the other."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        inputs, scales = x[tokens], weights.flatten()[order].unsqueeze(1)
        counts = experts.flatten().bincount(minlength=len(self.down)).tolist()
        result = x.new_zeros(x.shape)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                result.index_add_(0, tokens[mine], self.one(expert, inputs[mine]).mul_(scales[mine]))
                start += count
        return result


class PlainExperts(LoopedExperts):
    """Experts without a gate, one after the other: up, an activation, down.

    Attributes:
        up: per expert [size, hidden_size].
        bias: [hidden_size], added to what the experts of a token give together; None: absent.
    """

    __slots__ = ("_kernels", "activation", "bias")

    def __init__(
        self, sizes: tuple[int, int, int], activation: Activation, kernels: Kernels, *, has_output_bias: bool
    ) -> None:
        """`sizes`: number of experts, hidden size, and size of their middle."""
        num_experts, hidden_size, size = sizes
        up = [kernels.linear_weight(size, hidden_size) for _ in range(num_experts)]
        super().__init__(up, [kernels.linear_weight(hidden_size, size) for _ in range(num_experts)])
        self._kernels, self.activation = kernels, activation
        self.bias = kernels.vector(hidden_size) if has_output_bias else None

    @property
    def up(self) -> Sequence[LinearWeight]:
        """First matrices of the experts, for the caller to fill."""
        return self.gate_up

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run x through one expert."""
        inner = self._kernels.activate(self.up[expert].multiply(x), self.activation)
        return self.down[expert].multiply(inner)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, one expert after the other, and the bias."""
        mixed = super().mix(x, weights, experts)
        if self.bias is None:
            return mixed
        from tokenmill.model.kernels.stored_tensors import tensor_over

        return mixed.add_(tensor_over(self.bias))
