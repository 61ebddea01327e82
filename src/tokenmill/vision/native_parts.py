"""The parts of a vision tower on the native kernels: packed matrices, and the decoder's attention without its mask.

Attention takes keys and values from pages, so each image gets some for as long as it is encoded. A head is padded with
zeros to what the kernels take (72 numbers, in the 8B model, to 80), behind each of the halves that rotation pairs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import native_ops
from tokenmill.kernels.native import MODULE
from tokenmill.kernels.native_weight import PackedWeight
from tokenmill.vision.tower_parts import EPS

if TYPE_CHECKING:
    from tokenmill import _native

PAGE_SIZE = 256
# Numbers of a head are a multiple of it.
HEAD_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Patches:
    """The patches of one image as one request, and what its addresses point into."""

    step: _native.PlannedStep
    layer: _native.AttentionLayer
    held: tuple[torch.Tensor | npt.NDArray[np.int32], ...]


class NativeParts:
    """See `TowerParts`.

    Args:
        weights: bfloat16, in plain form.
    """

    def __init__(self, native: _native.Kernels, weights: Mapping[str, torch.Tensor], num_heads: int) -> None:
        self._native = native
        self.positions = weights["pos_embed.weight"]
        self._vectors = {name: weight for name, weight in weights.items() if weight.dim() == 1}
        self._heads = num_heads
        head_dim = weights["blocks.0.attn.proj.weight"].shape[1] // num_heads
        self._head_dim = -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self._scale = head_dim**-0.5
        self._matrices: dict[str, PackedWeight] = {}
        for name, weight in weights.items():
            if weight.dim() > 1 and weight is not self.positions:
                self._add(name.removesuffix(".weight"), weight.flatten(1))
        kept = sum(vector.nbytes for vector in self._vectors.values()) + self.positions.nbytes
        self.num_bytes = kept + sum(matrix.num_bytes for matrix in self._matrices.values())
        self._module = importlib.import_module(MODULE)
        shape = (num_heads, num_heads, self._head_dim, PAGE_SIZE)
        self._attention: _native.Attention = self._module.Attention(native, *shape, is_causal=False)

    def _add(self, name: str, weight: torch.Tensor) -> None:
        if name.endswith("attn.qkv"):
            weight = torch.cat([self._padded(one) for one in weight.chunk(3)])
            bias = f"{name}.bias"
            self._vectors[bias] = torch.cat([self._padded(one) for one in self._vectors[bias].chunk(3)])
        elif name.endswith("attn.proj"):
            weight = self._padded(weight.T).T
        matrix = PackedWeight(self._native, (weight.shape[0], weight.shape[1]))
        matrix.load_rows(0, weight)
        self._matrices[name] = matrix

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """[heads * head_dim, ...] with zeros behind each half of a head."""
        half = x.shape[0] // self._heads // 2
        wide = x.new_zeros(self._heads, 2, self._head_dim // 2, *x.shape[1:])
        wide[:, :, :half] = x.reshape(self._heads, 2, half, *x.shape[1:])
        return wide.flatten(0, 2)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """See `TowerParts.linear`."""
        return self._matrices[name].multiply(x, self._vectors[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """See `TowerParts.norm`."""
        weight, bias = self._vectors[f"{name}.weight"], self._vectors[f"{name}.bias"]
        return native_ops.layer_norm(self._native, x, weight, bias, EPS, delta)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """See `TowerParts.gelu`."""
        return native_ops.gelu(self._native, x)

    def angles(self, half: torch.Tensor) -> _Patches:
        """The image as a request of one step: its pages, and the angles of its patches, rounded to bfloat16."""
        padded = torch.zeros(half.shape[0], self._head_dim // 2)
        padded[:, : half.shape[1]] = half
        cos, sin = padded.cos().bfloat16(), padded.sin().bfloat16()
        count = len(half)
        starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
        pages = torch.arange(-(-count // PAGE_SIZE), dtype=torch.int32)
        memory = torch.empty(2, len(pages), self._heads, PAGE_SIZE, self._head_dim, dtype=torch.bfloat16)
        angles = cos.data_ptr(), sin.data_ptr()
        kv = self._module.LayerKV(memory[0].data_ptr(), memory[1].data_ptr(), 0, 0)
        layer = self._module.AttentionLayer(kv, self._module.HeadNorms(0, 0, 0.0), *angles, self._scale, 0)
        addresses = starts.ctypes.data, lengths.ctypes.data, pages.data_ptr(), len(pages)
        step = self._attention.plan(1, *addresses, *angles)
        return _Patches(step, layer, (cos, sin, starts, lengths, pages, memory))

    def attend(self, qkv: torch.Tensor, angles: _Patches) -> torch.Tensor:
        """See `TowerParts.attend`."""
        out = qkv.new_empty(len(qkv), self._heads * self._head_dim)
        self._attention.forward(angles.step, angles.layer, qkv.data_ptr(), out.data_ptr())
        return out
