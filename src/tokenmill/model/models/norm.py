"""Root mean square normalization (Zhang and Sennrich 2019) of the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.protocol import Kernels

if TYPE_CHECKING:
    import torch


class RMSNorm:
    """The weight of one normalization."""

    __slots__ = ("_kernels", "spec", "weight")

    def __init__(self, size: int, spec: NormSpec, kernels: Kernels) -> None:
        self.weight = kernels.vector(size)
        self.spec = spec
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, delta: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """Add scale * delta, if there is one, to hidden in place; return the norm of hidden [T, size], a new tensor."""
        eps, is_offset = self.spec.eps, self.spec.is_offset
        if delta is None:
            return self._kernels.rms_norm(hidden, self.weight, eps, is_offset)
        return self._kernels.add_rms_norm(hidden, delta, self.weight, eps, scale, is_offset)
