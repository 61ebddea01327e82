"""Root mean square normalization (Zhang and Sennrich 2019) of the hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.kernels.protocol import Kernels
from tokenmill.models.linear import Target, vector_target


class RMSNorm:
    """The weight of one normalization."""

    __slots__ = ("_kernels", "eps", "weight")

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        self.weight = kernels.vector(size)
        self.eps = eps
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """hidden += update, in place, if there is one; then the norm of hidden [T, size], a new tensor."""
        if update is None:
            return self._kernels.rms_norm(hidden, self.weight, self.eps)
        return self._kernels.add_rms_norm(hidden, update, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensor that fills this layer."""
        yield vector_target(f"{prefix}.weight", self.weight)
