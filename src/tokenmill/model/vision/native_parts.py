"""The parts of a vision tower on the native kernels: packed matrices, and the decoder's attention without its mask.

Attention takes keys and values from pages, so each image gets some for as long as it is encoded; a window of its
patches is what a request is to the decoder. A head is padded with zeros to what the kernels take (72 numbers, in the 8B
model, to 80), behind each of the halves that rotation pairs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.model.kernels import native_ops
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import Activation, WeightRole
from tokenmill.model.vision.tower_parts import EPS
from tokenmill.model.vision.tower_shapes import POOLED_NORM, POSITIONS

if TYPE_CHECKING:
    from tokenmill import _native

PAGE_SIZE = 64
# Numbers of a head are a multiple of it.
HEAD_MULTIPLE = 16


class _Patches(msgspec.Struct, frozen=True):
    """The windows of one image as requests, and the memory that their addresses point into."""

    step: _native.PlannedStep
    layer: _native.AttentionLayer
    held: tuple[torch.Tensor | npt.NDArray[np.int32], ...]


class NativeParts:
    """The parts of a vision tower on the native kernels.

    Args:
        weights: bfloat16, by the names of `tower_shapes`.
        is_gated: the first matrix of an MLP is gate and up.
    """

    dtype, device = torch.bfloat16, torch.device("cpu")

    def __init__(
        self, native: _native.Kernels, weights: Mapping[str, torch.Tensor], num_heads: int, is_gated: bool = False
    ) -> None:
        self._native = native
        self._is_gated = is_gated
        self.positions, self.pooled_norm = weights.get(POSITIONS), weights.get(POOLED_NORM)
        self._vectors = {name: weight for name, weight in weights.items() if weight.dim() == 1}
        self._heads = num_heads
        head_dim = weights["blocks.0.attn.proj.weight"].shape[1] // num_heads
        self._head_dim = -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self._scale = head_dim**-0.5
        self._matrices: dict[str, PackedWeight] = {}
        for name, weight in weights.items():
            if weight.dim() > 1 and name != POSITIONS:
                self._add(name.removesuffix(".weight"), weight)
        kept = sum(vector.nbytes for vector in self._vectors.values())
        kept += 0 if self.positions is None else self.positions.nbytes
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
        role = WeightRole.GATE_UP if self._is_gated and name.endswith("mlp.linear_fc1") else WeightRole.LINEAR
        matrix = PackedWeight(self._native, (weight.shape[0], weight.shape[1]), role)
        matrix.load_rows(0, weight)
        self._matrices[name] = matrix

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return [heads * head_dim, ...] with zeros behind each half of a head."""
        half = x.shape[0] // self._heads // 2
        wide = x.new_zeros(self._heads, 2, self._head_dim // 2, *x.shape[1:])
        wide[:, :, :half] = x.reshape(self._heads, 2, half, *x.shape[1:])
        return wide.flatten(0, 2)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a packed matrix, and add the bias."""
        return self._matrices[name].multiply(x, self._vectors.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` and normalize: by LayerNorm with a bias, else by RMSNorm."""
        weight, bias = self._vectors[f"{name}.weight"], self._vectors.get(f"{name}.bias")
        if bias is None:
            return native_ops.rms_norm(self._native, x, weight, EPS, delta)
        return native_ops.layer_norm(self._native, x, weight, bias, EPS, delta)

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the middle of a block's MLP: silu(gate) * up, or GELU of a product."""
        if self._is_gated:
            return self._matrices[name].gated(x, self._vectors.get(f"{name}.bias"))
        return native_ops.activate(self._native, self.linear(name, x), Activation.GELU)

    def angles(self, half: torch.Tensor, lengths: Sequence[int]) -> _Patches:
        """Return the windows as requests of one step: their pages, and the patches' angles, rounded to bfloat16."""
        padded = torch.zeros(half.shape[0], self._head_dim // 2)
        padded[:, : half.shape[1]] = half
        cos, sin = padded.cos().bfloat16(), padded.sin().bfloat16()
        counts = np.array(lengths, np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        most = -(-int(counts.max()) // PAGE_SIZE)
        pages = torch.arange(len(counts) * most, dtype=torch.int32)
        memory = torch.empty(2, len(pages), self._heads, PAGE_SIZE, self._head_dim, dtype=torch.bfloat16)
        angles = cos.data_ptr(), sin.data_ptr()
        kv = self._module.LayerKV(*(self._module.KVNumbers(part.data_ptr(), memory.stride(1), 0) for part in memory))
        norms = self._module.HeadNorms(0, 0, 0, 0.0, False)
        layer = self._module.AttentionLayer(kv, norms, *angles, self._scale, 0, 0, ahead=-1)
        addresses = starts.ctypes.data, counts.ctypes.data, pages.data_ptr(), most
        step = self._attention.plan(len(counts), *addresses, *angles)
        return _Patches(step, layer, (cos, sin, starts, counts, pages, memory))

    def attend(self, qkv: torch.Tensor, angles: _Patches) -> torch.Tensor:
        """Run the native attention within each window."""
        out = qkv.new_empty(len(qkv), self._heads * self._head_dim)
        self._attention.forward(angles.step, angles.layer, qkv.data_ptr(), out.data_ptr())
        return out
