"""Layouts of the KV cache for attention in torch or Triton: head-major for batched products, token-major for GPUs."""

from __future__ import annotations

import torch

from tokenmill.model.attention.protocol import AttentionSpec, KVCache, Part, Take
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.device_arrays import DeviceArrays
from tokenmill.platform.tensor_memory import Scratch


class HeadMajorKV(KVCache):
    """Keys and values [layers, pages, kv_heads, page_size, head_dim]; FlashInfer calls it HND.

    All tokens of a head in a page are one row, so that picking rows head by head gives a matrix per head, ready for a
    batched product, in a single copy.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        num_pages: int,
        page_size: int,
        dtype: str,
        device: str,
        *,
        is_page_first: bool = False,
        take: Take | None = None,
    ) -> None:
        super().__init__(spec, num_pages, page_size, dtype, device, is_page_first=is_page_first, take=take)
        self._keys, self._values = (Scratch(memory.dtype, device) for memory in (self.keys, self.values))
        self._heads = torch.arange(spec.num_kv_heads, device=device)[:, None]
        # From a page to the next, in rows of a head.
        self._page_rows = self.keys.stride(1) // (page_size * spec.head_dim)

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: str) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys and values."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        return (shape, dtype), (shape, dtype)

    @classmethod
    def arrays_of(cls, device: str) -> ArrayLibrary:
        """Return torch's: what gathers pages multiplies them in torch."""
        return DeviceArrays(device)

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows to `write` for slots [T] (`page_id * page_size + offset`): [kv_heads * T] int64."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return ((pages * self._page_rows + self._heads) * self.page_size + offsets).flatten()

    def write(self, layer: int, slot_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in the rows `slot_rows` of a layer."""
        _rows(self.keys[layer], 1).index_copy_(0, slot_rows, k.transpose(0, 1).flatten(0, 1))
        _rows(self.values[layer], 1).index_copy_(0, slot_rows, v.transpose(0, 1).flatten(0, 1))

    def page_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the rows to `gather` for pages [P]: [kv_heads * P] int64, head by head."""
        return (pages.to(torch.int64) * self._page_rows + self._heads).flatten()

    def gather(self, layer: int, page_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values of P pages: two tensors [kv_heads, P * page_size, head_dim].

        The next call overwrites their memory.
        """
        keys = self._gather(self.keys[layer], page_rows, self._keys)
        return keys, self._gather(self.values[layer], page_rows, self._values)

    def _gather(self, memory: torch.Tensor, page_rows: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        rows = _rows(memory, self.page_size)
        out = scratch.take(len(page_rows), rows.shape[1])
        return torch.index_select(rows, 0, page_rows, out=out).view(len(self._heads), -1, memory.shape[-1])


def _rows(memory: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a layer's memory, and all that lies behind it up to its last page, as rows of so many tokens of a head."""
    size = tokens * memory.shape[-1]
    count = ((len(memory) - 1) * memory.stride(0) + memory[0].numel()) // size
    return memory.as_strided((count, size), (size, 1))


class TokenMajorKV(KVCache):
    """Keys and values [layers, pages, page_size, kv_heads, head_dim], as GPU libraries expect them; also called NHD.

    A slot's number is its place in a layer.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: str) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys and values."""
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return (shape, dtype), (shape, dtype)

    @classmethod
    def arrays_of(cls, device: str) -> ArrayLibrary:
        """Return torch's, of the device."""
        return DeviceArrays(device)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer."""
        return self.keys[layer], self.values[layer]
