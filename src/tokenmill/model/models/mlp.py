"""The dense feed-forward block: a gated pair of projections (Shazeer 2020), or a single one, by SiLU, GELU or ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.kernels.protocol import Activation, Gate, Kernels, WeightRole
from tokenmill.model.models.linear import Linear, second_linear
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.collective import Collective

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.adapters import AdaptedLayer


class MLP:
    """The block: gate and up in one product, then down.

    Args:
        prefix: of the roles of its weights.
    """

    __slots__ = ("down", "gate", "gate_up")

    def __init__(
        self, spec: MlpSpec, hidden_size: int, kernels: Kernels, collective: Collective, prefix: str = ""
    ) -> None:
        inner, self.gate = collective.shard.part(spec.size), Gate[spec.activation.upper()]
        pair = {f"{prefix}gate": inner, f"{prefix}up": inner}
        self.gate_up = Linear(hidden_size, pair, spec.bias, kernels, WeightRole.GATE_UP, collective)
        down = f"{prefix}down"
        self.down = second_linear(down, inner, hidden_size, spec.down_bias, kernels, collective, WeightRole.DOWN)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Its matrices, which adapters add to."""
        return self.gate_up, self.down

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Apply the block: [T, hidden] -> [T, hidden]."""
        return self.down.forward(self.gate_up.gated(x, self.gate, adapted), adapted)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self.gate_up.targets(scope)
        yield from self.down.targets(scope)


class PlainMLP:
    """The block without a gate: up, an activation, down."""

    __slots__ = ("_collective", "_inner", "_kernels", "activation", "down", "up")

    def __init__(self, spec: MlpSpec, hidden_size: int, kernels: Kernels, collective: Collective) -> None:
        self._inner, self._collective, self._kernels = collective.shard.part(spec.size), collective, kernels
        self.activation = Activation[spec.activation.upper()]
        self.up = Linear(hidden_size, {"up": self._inner}, spec.bias, kernels)
        self.down = second_linear("down", self._inner, hidden_size, spec.down_bias, kernels, collective)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Its matrices, which adapters add to."""
        return self.up, self.down

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Apply the block: [T, hidden] -> [T, hidden]."""
        inner = self._kernels.activate(self.up.forward(x, adapted), self.activation)
        return self.down.forward(self._collective.between(inner, self._inner), adapted)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self.up.targets(scope)
        yield from self.down.targets(scope)
