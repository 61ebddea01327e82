"""The parts of a vision tower, and their plain torch form, the reference for the native one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from tokenmill.model.kernels.torch_kernels import rms_norm
from tokenmill.model.vision.tower_shapes import PATCHES, POOLED_NORM, POSITIONS

EPS = 1e-6

TurnedWindows = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]


class TowerParts(Protocol):
    """The weights of a tower by name, and what is computed with them, over T patches of one image.

    Attributes:
        dtype, device: of patches and of results.
        positions: the learned positions, [side**2, hidden_size]; None: absent.
        pooled_norm: of averages of patches, [hidden_size], as offsets from 1; None: nothing is averaged.
        num_bytes: memory of all weights.
    """

    dtype: torch.dtype
    device: torch.device
    positions: torch.Tensor | None
    pooled_norm: torch.Tensor | None
    num_bytes: int

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [T, in_size] -> [T, out_size], with bias."""

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [T, size], to which `delta` is added first, in place; RMSNorm where there is no bias."""

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the middle of a block's MLP, [T, intermediate_size]: GELU with tanh, or silu(gate) * up."""

    def angles(self, half: torch.Tensor, lengths: Sequence[int]) -> Any:
        """Prepare the input of `attend` once for all blocks: half [T, head_dim / 2] float32 turns pairs (i, i + half).

        Args:
            lengths: of the windows that the patches lie in, one behind the other.
        """

    def attend(self, qkv: torch.Tensor, angles: Any) -> torch.Tensor:
        """Attend: [T, 3 * hidden_size] -> [T, hidden_size]; every patch sees every other of its window."""


class TorchParts:
    """The parts of a vision tower in plain torch.

    Args:
        weights: all of one dtype, on one device, by the names of `tower_shapes`.
        is_gated: the first matrix of an MLP is gate and up.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], num_heads: int, is_gated: bool = False) -> None:
        self.dtype, self.device = weights[PATCHES].dtype, weights[PATCHES].device
        self.positions, self.pooled_norm = weights.get(POSITIONS), weights.get(POOLED_NORM)
        self._is_gated = is_gated
        self.num_bytes = sum(weight.nbytes for weight in weights.values())
        self._weights = weights
        self._num_heads = num_heads

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a weight, and add the bias."""
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` and normalize: by LayerNorm with a bias, else by RMSNorm."""
        if delta is not None:
            x.add_(delta)
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        if bias is None:
            return rms_norm(x, weight, EPS)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the middle of a block's MLP: silu(gate) * up, or GELU of a product."""
        product = self.linear(name, x)
        if not self._is_gated:
            return functional.gelu(product, approximate="tanh")
        gate, up = product.chunk(2, 1)
        return functional.silu(gate) * up

    def angles(self, half: torch.Tensor, lengths: Sequence[int]) -> TurnedWindows:
        """Return cos and sin, [T, 1, head_dim] float32, and the windows."""
        both = torch.cat((half, half), 1).unsqueeze(1)
        return both.cos(), both.sin(), tuple(lengths)

    def attend(self, qkv: torch.Tensor, angles: TurnedWindows) -> torch.Tensor:
        """Rotate q and k, and attend within each window."""
        cos, sin, lengths = angles
        q, k, v = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        rotated = (one.transpose(0, 1).split(lengths, 1) for one in (_rotate(q, cos, sin), _rotate(k, cos, sin), v))
        windows = [functional.scaled_dot_product_attention(*one) for one in zip(*rotated, strict=True)]
        return torch.cat(windows, 1).transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
