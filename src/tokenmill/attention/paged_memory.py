"""The KV memory of GPU backends: the tokens of a page side by side, each with all its heads, as libraries want it.

Layout: [layers, pages, page_size, kv_heads, head_dim], so that a slot's number is its place in a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.protocol import AttentionSpec
from tokenmill.platform.memory import zeros


class PagedMemory:
    """Keys and values in pages. Page 0 takes the writes of padding and belongs to nobody.

    Attributes:
        keys, values: [layers, num_pages, page_size, kv_heads, head_dim].
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        shape = (spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.keys = zeros(shape, dtype, device)
        self.values = zeros(shape, dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer."""
        return self.keys[layer], self.values[layer]

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of some pages in the canonical layout [layers, 2, len(pages), page_size, kv_heads, head_dim]."""
        index = self._index(pages)
        return torch.stack((self.keys.index_select(1, index), self.values.index_select(1, index)), 1)

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave."""
        index, data = self._index(pages), data.to(self.keys.device)
        self.keys.index_copy_(1, index, data[:, 0])
        self.values.index_copy_(1, index, data[:, 1])

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)
