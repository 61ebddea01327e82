"""The dense feed-forward block: a SiLU-gated pair of projections (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.kernels.protocol import Kernels, MatrixRole
from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Linear, Target


class MLP:
    """gate and up in one product, then down."""

    __slots__ = ("down", "gate_up")

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        hidden, size, bias = architecture.hidden_size, architecture.intermediate_size, architecture.mlp_bias
        self.gate_up = Linear(hidden, {"gate_proj": size, "up_proj": size}, bias, kernels, MatrixRole.GATED)
        self.down = Linear(size, {"down_proj": hidden}, bias, kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down.forward(self.gate_up.gated(x))

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)
