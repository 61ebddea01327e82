"""Norms of the hidden states: RMSNorm (Zhang and Sennrich 2019), and LayerNorm (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.targets import Target, TargetScope

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

    def targets(self, scope: TargetScope, role: str) -> Iterator[Target]:
        """Yield the checkpoint tensor that fills the weight."""
        yield scope.vector(role, self.weight)


class LayerNorm:
    """The weight of one normalization, and its bias. `bias`: None: absent."""

    __slots__ = ("_kernels", "bias", "spec", "weight")

    def __init__(self, size: int, spec: NormSpec, kernels: Kernels) -> None:
        self.weight = kernels.vector(size)
        self.bias = kernels.vector(size) if spec.has_bias else None
        self.spec = spec
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, delta: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """Add delta, if there is one, to hidden in place; return the norm of hidden [T, size], a new tensor."""
        assert scale == 1, "no family multiplies what it adds"
        return self._kernels.layer_norm(hidden, self.weight, self.bias, self.spec.eps, delta)

    def targets(self, scope: TargetScope, role: str) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill weight and bias."""
        yield scope.vector(role, self.weight)
        if self.bias is not None:
            yield scope.vector(role, self.bias, "bias")


Norm: TypeAlias = RMSNorm | LayerNorm


def make_norm(size: int, spec: NormSpec, kernels: Kernels) -> Norm:
    """Return a norm over `size` numbers, unfilled."""
    return LayerNorm(size, spec, kernels) if spec.is_centered else RMSNorm(size, spec, kernels)
