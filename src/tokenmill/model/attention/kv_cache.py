"""The layouts of the KV cache: head-major for torch, token-major for GPUs, packed for the native attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.model.attention.protocol import AttentionSpec, KVCache, Part
from tokenmill.platform.tensor_memory import Scratch

SUBPAGE = 16
LARGEST_INT8 = 127.0


class HeadMajorKV(KVCache):
    """Keys and values [layers, pages, kv_heads, page_size, head_dim]; FlashInfer calls it HND.

    All tokens of a head in a page are one row, so that picking rows head by head gives a matrix per head, ready for a
    batched product, in a single copy.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(spec, num_pages, page_size, dtype, device)
        self._keys, self._values = Scratch(dtype, device), Scratch(dtype, device)
        self._heads = torch.arange(spec.num_kv_heads, device=device)[:, None]

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys and values."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        return (shape, dtype), (shape, dtype)

    def to_canonical(self, *parts: torch.Tensor) -> torch.Tensor:
        """Stack keys and values, and swap heads and tokens."""
        return torch.stack(parts, 1).transpose(3, 4).contiguous()

    def from_canonical(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Swap tokens and heads, and split keys from values."""
        return data.transpose(3, 4).unbind(1)

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows to `write` for slots [T] (`page_id * page_size + offset`): [kv_heads * T] int64."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return ((pages * len(self._heads) + self._heads) * self.page_size + offsets).flatten()

    def write(self, layer: int, slot_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in the rows `slot_rows` of a layer."""
        self.keys[layer].flatten(0, 2).index_copy_(0, slot_rows, k.transpose(0, 1).flatten(0, 1))
        self.values[layer].flatten(0, 2).index_copy_(0, slot_rows, v.transpose(0, 1).flatten(0, 1))

    def page_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the rows to `gather` for pages [P]: [kv_heads * P] int64, head by head."""
        return (pages.to(torch.int64) * len(self._heads) + self._heads).flatten()

    def gather(self, layer: int, page_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values of P pages: two tensors [kv_heads, P * page_size, head_dim].

        The next call overwrites their memory.
        """
        keys = self._gather(self.keys[layer], page_rows, self._keys)
        return keys, self._gather(self.values[layer], page_rows, self._values)

    def _gather(self, memory: torch.Tensor, page_rows: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        rows = memory.flatten(0, 1).flatten(1, 2)
        out = scratch.take(len(page_rows), rows.shape[1])
        return torch.index_select(rows, 0, page_rows, out=out).view(len(self._heads), -1, memory.shape[-1])


class TokenMajorKV(KVCache):
    """Keys and values [layers, pages, page_size, kv_heads, head_dim], as GPU libraries expect them; also called NHD.

    A slot's number is its place in a layer.
    """

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys and values."""
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return (shape, dtype), (shape, dtype)

    def to_canonical(self, *parts: torch.Tensor) -> torch.Tensor:
        """Stack keys and values, which have the canonical order."""
        return torch.stack(parts, 1)

    def from_canonical(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split keys from values."""
        return data.unbind(1)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer."""
        return self.keys[layer], self.values[layer]


class PackedKV(KVCache):
    """The layout of the native attention: sub-pages of 16 tokens, numbers in pairs; bfloat16 or int8.

    keys    [layers, pages, kv_heads, page_size / 16, head_dim / 2, 16, 2]   pairs of dimensions
    values  [layers, pages, kv_heads, page_size / 16, 8, head_dim, 2]        pairs of tokens
    scales  [layers, pages, kv_heads, page_size] float32, of keys and of values; of int8 only
    """

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys, values and int8 scales; the page size is a multiple of 16."""
        assert page_size % SUBPAGE == 0, f"page size {page_size} is no multiple of {SUBPAGE}"
        shape = (spec.num_layers, num_pages, spec.num_kv_heads)
        count = page_size // SUBPAGE
        keys = (*shape, count, spec.head_dim // 2, SUBPAGE, 2), dtype
        values = (*shape, count, SUBPAGE // 2, spec.head_dim, 2), dtype
        scales = (*shape, page_size), torch.float32
        return (keys, values, scales, scales) if dtype == torch.int8 else (keys, values)

    def to_canonical(self, *parts: torch.Tensor) -> torch.Tensor:
        """Unpack keys and values, and dequantize int8 to bfloat16."""
        # [layers, pages, heads, sub-pages, dims / 2, 16, 2] and [layers, pages, heads, sub-pages, 8, dims, 2]
        keys = parts[0].permute(0, 1, 3, 5, 2, 4, 6).flatten(5, 6).flatten(2, 3)
        values = parts[1].permute(0, 1, 3, 4, 6, 2, 5).flatten(2, 4)
        both = torch.stack((keys, values), 1)
        if len(parts) == 2:
            return both
        scales = torch.stack(parts[2:], 1).transpose(3, 4)
        return (both * scales.unsqueeze(-1)).to(torch.bfloat16)

    def from_canonical(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Pack keys and values, and quantize them for int8 with a scale per token and head."""
        scales: Sequence[torch.Tensor] = ()
        if self.keys.dtype == torch.int8:
            steps = data.abs().amax(-1).float() / LARGEST_INT8
            data = (data / steps.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round()
            scales = steps.transpose(3, 4).unbind(1)
        numbers = data.to(self.keys.dtype).unflatten(3, (-1, SUBPAGE))
        keys = numbers[:, 0].unflatten(-1, (-1, 2)).permute(0, 1, 4, 2, 5, 3, 6)
        values = numbers[:, 1].unflatten(3, (-1, 2)).permute(0, 1, 5, 2, 3, 6, 4)
        return keys, values, *scales
