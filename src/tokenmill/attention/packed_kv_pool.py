"""The memory of the KV cache in the layout of the native attention: strips of 16 tokens, numbers in pairs.

    keys    [layers, pages, kv_heads, page_size / 16, head_dim / 2, 16, 2]   pairs of dimensions
    values  [layers, pages, kv_heads, page_size / 16, 8, head_dim, 2]        pairs of tokens

bfloat16, or int8 with one float32 scale for each key and each value of a token and head. Which page belongs to whom is
not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.protocol import AttentionSpec
from tokenmill.platform.memory import zeros

STRIP = 16
LARGEST_INT8 = 127.0


class PackedKVPool:
    """Keys and values in pages. Page 0 takes the writes of padding and belongs to nobody.

    Attributes:
        keys, values: as in the module's text.
        scales: [2 (keys, values), layers, num_pages, kv_heads, page_size] float32 for int8, else None.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        """Allocate and zero `num_pages` pages, page 0 among them.

        Args:
            page_size: a multiple of 16.
            dtype: bfloat16 or int8.
        """
        assert page_size % STRIP == 0, f"page size {page_size} is no multiple of {STRIP}"
        shape = (spec.num_layers, num_pages, spec.num_kv_heads)
        strips = page_size // STRIP
        self.keys = zeros((*shape, strips, spec.head_dim // 2, STRIP, 2), dtype, "cpu")
        self.values = zeros((*shape, strips, STRIP // 2, spec.head_dim, 2), dtype, "cpu")
        self.scales = zeros((2, *shape, page_size), torch.float32, "cpu") if dtype == torch.int8 else None
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of some pages, bfloat16, in canonical layout [layers, 2, len(pages), page_size, heads, head_dim]."""
        index = self._index(pages)
        # [layers, pages, heads, strips, dims / 2, 16, 2] and [layers, pages, heads, strips, 8, dims, 2]
        keys = self.keys.index_select(1, index).permute(0, 1, 3, 5, 2, 4, 6).flatten(5, 6).flatten(2, 3)
        values = self.values.index_select(1, index).permute(0, 1, 3, 4, 6, 2, 5).flatten(2, 4)
        both = torch.stack((keys, values), 1)
        if self.scales is None:
            return both
        scales = self.scales.index_select(2, index).transpose(0, 1).transpose(3, 4)
        return (both * scales.unsqueeze(-1)).to(torch.bfloat16)

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave.

        Args:
            data: [layers, 2, len(pages), page_size, kv_heads, head_dim].
        """
        index = self._index(pages)
        if self.scales is not None:
            scales = data.abs().amax(-1).float() / LARGEST_INT8
            self.scales.index_copy_(2, index, scales.transpose(3, 4).transpose(0, 1))
            data = (data / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round()
        numbers = data.to(self.keys.dtype).unflatten(3, (-1, STRIP))
        keys = numbers[:, 0].unflatten(-1, (-1, 2)).permute(0, 1, 4, 2, 5, 3, 6)
        values = numbers[:, 1].unflatten(3, (-1, 2)).permute(0, 1, 5, 2, 3, 6, 4)
        self.keys.index_copy_(1, index, keys)
        self.values.index_copy_(1, index, values)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        return torch.tensor(pages, dtype=torch.int64)
