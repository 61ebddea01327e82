"""The memory of the KV cache: pages of keys and values for every layer.

Layout: [layers, kv_heads, pages, page_size, head_dim], heads outside, so that a gather of pages yields one contiguous
matrix per head, ready for a batched product. Which page belongs to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.protocol import AttentionSpec
from tokenmill.platform.memory import zeros

PADDING_PAGE = 0


class KVPool:
    """Keys and values in pages. Page 0 takes the writes of padding and belongs to nobody.

    Attributes:
        keys, values: [layers, kv_heads, num_pages, page_size, head_dim].
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        """Allocate and zero `num_pages` pages, page 0 among them."""
        shape = (spec.num_layers, spec.num_kv_heads, num_pages, page_size, spec.head_dim)
        self.keys = zeros(shape, dtype, device)
        self.values = zeros(shape, dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots [T] (`page_id * page_size + offset`) of a layer."""
        self.keys[layer].flatten(1, 2).index_copy_(1, slots, k.transpose(0, 1))
        self.values[layer].flatten(1, 2).index_copy_(1, slots, v.transpose(0, 1))

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of pages [P]: two tensors [kv_heads, P * page_size, head_dim]."""
        keys = self.keys[layer].index_select(1, pages)
        values = self.values[layer].index_select(1, pages)
        return keys.flatten(1, 2), values.flatten(1, 2)

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of some pages in the canonical layout [layers, 2, len(pages), page_size, kv_heads, head_dim]."""
        index = self._index(pages)
        both = torch.stack((self.keys.index_select(2, index), self.values.index_select(2, index)), 1)
        return both.permute(0, 1, 3, 4, 2, 5).contiguous()

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave.

        Args:
            data: [layers, 2, len(pages), page_size, kv_heads, head_dim] in the pool's dtype.
        """
        index = self._index(pages)
        both = data.to(self.keys.device).permute(0, 1, 4, 2, 3, 5)
        self.keys.index_copy_(2, index, both[:, 0])
        self.values.index_copy_(2, index, both[:, 1])

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)
