"""The dense feed-forward block: a SiLU-gated pair of projections (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenmill.models.architecture import Architecture
from tokenmill.models.linear import Empty, Linear, Target


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * size] -> silu(first half) * second half, [T, size]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class MLP:
    """gate and up in one product, then down."""

    __slots__ = ("down", "gate_up")

    def __init__(self, architecture: Architecture, empty: Empty) -> None:
        hidden, size, bias = architecture.hidden_size, architecture.intermediate_size, architecture.mlp_bias
        self.gate_up = Linear(hidden, {"gate_proj": size, "up_proj": size}, bias, empty)
        self.down = Linear(size, {"down_proj": hidden}, bias, empty)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down.forward(gated(self.gate_up.forward(x)))

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.gate_up.targets(prefix)
        yield from self.down.targets(prefix)
