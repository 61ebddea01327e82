"""Backend `native`: the C++ attention over the packed KV cache, for bf16 models on CPUs.

One call a layer does all between two linears: norms and rotation of the heads, the write into the cache, attention.
A token's result depends on its own past alone, bit for bit: not on its batch, its chunk or the number of threads.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.packed_kv_pool import STRIP, PackedKVPool
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.kernels.heads import HeadNorms, RotaryTables
from tokenmill.kernels.native import MODULE

if TYPE_CHECKING:
    from tokenmill import _native

MAX_HEAD_DIM = 256


def unsuitable(spec: AttentionSpec, page_size: int, dtype: torch.dtype) -> str | None:
    """Why the native attention does not take a model with these pages; None: it does."""
    if dtype != torch.bfloat16:
        return f"the native attention is for bfloat16, not {str(dtype).removeprefix('torch.')}"
    if page_size % STRIP:
        return f"the native attention needs a page size that is a multiple of {STRIP}, not {page_size}"
    if spec.head_dim % STRIP or spec.head_dim > MAX_HEAD_DIM:
        return f"the native attention needs heads of a multiple of {STRIP} up to {MAX_HEAD_DIM}, not {spec.head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step cut into pieces, and what must live as long: it holds addresses of these."""

    step: _native.PlannedStep
    batch: ForwardBatch
    rotary: RotaryTables


class NativeAttention:
    """See the module's text.

    Attributes:
        attention: the C++ side of it.
        memory: the KV memory of each layer.
    """

    name = "native"

    def __init__(self, spec: AttentionSpec, kv: PackedKVPool, kernels: _native.Kernels) -> None:
        self.spec = spec
        self.kv = kv
        native = importlib.import_module(MODULE)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention: _native.Attention = native.Attention(kernels, *heads, kv.page_size, spec.scale)
        self._no_norms: _native.HeadNorms = native.HeadNorms(0, 0, 0.0)
        self._norms = native.HeadNorms
        scales = torch.zeros(2, spec.num_layers, 0) if kv.scales is None else kv.scales
        self.memory: list[_native.LayerKV] = [
            native.LayerKV(*(memory[layer].data_ptr() for memory in (kv.keys, kv.values, *scales)))
            for layer in range(spec.num_layers)
        ]

    def plan(self, batch: ForwardBatch, rotary: RotaryTables) -> NativePlan:
        """See `AttentionBackend.plan`."""
        for lengths in (batch.query_starts, batch.context_lens):
            assert lengths.dtype == np.int32 and lengths.flags.c_contiguous, "lengths are int32 in one piece"
        assert batch.page_table.dtype == torch.int32 and batch.page_table.stride(1) == 1, "a page table is int32 rows"
        assert rotary.cos.is_contiguous() and rotary.sin.is_contiguous(), "the angles' tables lie in one piece"
        step = self.attention.plan(
            len(batch.query_lens),
            batch.query_starts.ctypes.data,
            batch.context_lens.ctypes.data,
            batch.page_table.data_ptr(),
            batch.page_table.stride(0),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
        )
        return NativePlan(step, batch, rotary)

    def forward(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layer: int, plan: NativePlan, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        assert qkv.is_contiguous() and qkv.dtype == torch.bfloat16, "the projection is bfloat16 in one piece"
        out = qkv.new_empty(len(qkv), self.spec.num_heads * self.spec.head_dim)
        head_norms = self.head_norms(norms)
        self.attention.forward(plan.step, self.memory[layer], head_norms, qkv.data_ptr(), out.data_ptr(), window or 0)
        return out

    def head_norms(self, norms: HeadNorms | None) -> _native.HeadNorms:
        """The norms of a layer's heads, by their addresses."""
        if norms is None:
            return self._no_norms
        return self._norms(norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
