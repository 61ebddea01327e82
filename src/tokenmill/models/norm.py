"""Root mean square normalization (Zhang and Sennrich 2019) of the hidden states."""

from __future__ import annotations

import torch

from tokenmill.kernels.protocol import Kernels


class RMSNorm:
    """The weight of one normalization."""

    __slots__ = ("_kernels", "eps", "weight")

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        self.weight = kernels.vector(size)
        self.eps = eps
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, delta: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """hidden += scale * delta, in place, if there is one; then the norm of hidden [T, size], a new tensor."""
        if delta is None:
            return self._kernels.rms_norm(hidden, self.weight, self.eps)
        return self._kernels.add_rms_norm(hidden, delta, self.weight, self.eps, scale)
