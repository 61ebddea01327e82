"""Root mean square normalization (Zhang and Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenmill.models.linear import Empty, Target


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] over its last dimension, times weight [size].

    Normalized in float32 and rounded to x's dtype before the product with the weight, as transformers does.
    """
    return functional.rms_norm(x, weight.shape, None, eps).mul_(weight)


class RMSNorm:
    """The weight of one normalization."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, empty: Empty) -> None:
        self.weight = empty(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape, a new tensor."""
        return rms_norm(x, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensor that fills this layer."""
        yield f"{prefix}.weight", self.weight
