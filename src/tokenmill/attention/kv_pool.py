"""The memory of the KV cache: pages of keys and values for every layer.

Layout: [layers, pages, kv_heads, page_size, head_dim]. A page lies in one piece, so memory is touched as pages come in
use; and all tokens of a head in a page are one row, so that picking rows head by head gives a matrix per head, ready
for a batched product, in a single copy. Which page belongs to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.protocol import AttentionSpec
from tokenmill.attention.scratch import Scratch
from tokenmill.platform.memory import zeros

PADDING_PAGE = 0


class KVPool:
    """Keys and values in pages. Page 0 takes the writes of padding and belongs to nobody.

    Attributes:
        keys, values: [layers, num_pages, kv_heads, page_size, head_dim].
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        """Allocate and zero `num_pages` pages, page 0 among them."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        self.keys = zeros(shape, dtype, device)
        self.values = zeros(shape, dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size
        self._keys, self._values = Scratch(dtype, device), Scratch(dtype, device)
        self._heads = torch.arange(spec.num_kv_heads, device=device)[:, None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page's keys, or of its values, in one layer."""
        return self.keys[0, 0].nbytes

    def slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Where `write` puts tokens with these slots [T] (`page_id * page_size + offset`): [kv_heads * T] int64."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return ((pages * len(self._heads) + self._heads) * self.page_size + offsets).flatten()

    def write(self, layer: int, slot_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in a layer, where `slot_rows` says."""
        self.keys[layer].flatten(0, 2).index_copy_(0, slot_rows, k.transpose(0, 1).flatten(0, 1))
        self.values[layer].flatten(0, 2).index_copy_(0, slot_rows, v.transpose(0, 1).flatten(0, 1))

    def page_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """What `gather` takes for these pages [P]: [kv_heads * P] int64, head by head."""
        return (pages.to(torch.int64) * len(self._heads) + self._heads).flatten()

    def gather(self, layer: int, page_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of P pages: two tensors [kv_heads, P * page_size, head_dim].

        They lie in memory that the next call overwrites.
        """
        keys = self._gather(self.keys[layer], page_rows, self._keys)
        return keys, self._gather(self.values[layer], page_rows, self._values)

    def _gather(self, memory: torch.Tensor, page_rows: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        rows = memory.flatten(0, 1).flatten(1, 2)
        out = scratch.take(len(page_rows), rows.shape[1])
        return torch.index_select(rows, 0, page_rows, out=out).view(len(self._heads), -1, memory.shape[-1])

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of some pages in the canonical layout [layers, 2, len(pages), page_size, kv_heads, head_dim]."""
        index = self._index(pages)
        both = torch.stack((self.keys.index_select(1, index), self.values.index_select(1, index)), 1)
        return both.transpose(3, 4).contiguous()

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave.

        Args:
            data: [layers, 2, len(pages), page_size, kv_heads, head_dim] in the pool's dtype.
        """
        index = self._index(pages)
        both = data.to(self.keys.device).transpose(3, 4)
        self.keys.index_copy_(1, index, both[:, 0])
        self.values.index_copy_(1, index, both[:, 1])

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)
