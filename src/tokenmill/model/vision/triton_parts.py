"""The parts of a vision tower on a GPU: Triton's norms and GELU; products and attention are the libraries'."""

from __future__ import annotations

import torch

from tokenmill.model.kernels.triton import gate, norm
from tokenmill.model.vision.tower_parts import EPS, TorchParts


class TritonParts(TorchParts):
    """The parts of a vision tower in torch, with norms and activations by Triton."""

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` and normalize, in one pass."""
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        if bias is not None:
            return norm.layer_norm(x.contiguous(), weight, bias, EPS, delta)
        if delta is None:
            return norm.rms_norm(x.contiguous(), weight, EPS)
        return norm.add_rms_norm(x, delta, weight, EPS)

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the middle of a block's MLP: silu(gate) * up, or GELU of a product."""
        product = self.linear(name, x)
        return gate.gated(product) if self._is_gated else gate.gelu(product)
