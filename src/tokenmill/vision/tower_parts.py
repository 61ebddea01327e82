"""What a vision tower is made of; and its plain torch form, to which the native one is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

EPS = 1e-6


class TowerParts(Protocol):
    """The weights of a tower by name, and what is computed with them, over T patches of one image.

    Attributes:
        positions: the learned positions, [side**2, hidden_size] in the tower's dtype.
        num_bytes: memory of all weights.
    """

    positions: torch.Tensor
    num_bytes: int

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T, out_size], with bias."""

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """LayerNorm of x [T, size], to which `delta` is added first, in place; a new tensor."""

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU with tanh; may overwrite x."""

    def angles(self, half: torch.Tensor) -> Any:
        """What `attend` needs, made once for all blocks: half [T, head_dim / 2] float32 turns pairs (i, i + half)."""

    def attend(self, qkv: torch.Tensor, angles: Any) -> torch.Tensor:
        """[T, 3 * hidden_size] -> [T, hidden_size]: every patch sees every other."""


class TorchParts:
    """See `TowerParts`.

    Args:
        weights: all of one dtype, on one device.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], num_heads: int) -> None:
        self.positions = weights["pos_embed.weight"]
        self.num_bytes = sum(weight.nbytes for weight in weights.values())
        self._weights = weights
        self._num_heads = num_heads

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See `TowerParts.linear`."""
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """See `TowerParts.norm`."""
        if delta is not None:
            x.add_(delta)
        return functional.layer_norm(
            x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], EPS
        )

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """See `TowerParts.gelu`."""
        return functional.gelu(x, approximate="tanh")

    def angles(self, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [T, 1, head_dim] float32."""
        both = torch.cat((half, half), 1).unsqueeze(1)
        return both.cos(), both.sin()

    def attend(self, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See `TowerParts.attend`."""
        q, k, v = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (_rotate(q, *angles), _rotate(k, *angles), v))
        return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
