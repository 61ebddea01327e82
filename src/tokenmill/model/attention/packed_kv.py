"""The layout of the KV cache for the native attention, in the host's memory."""

from __future__ import annotations

from tokenmill.model.attention.protocol import AttentionSpec, KVCache, Part
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.host_arrays import HostArrays

SUBPAGE = 16


class PackedKV(KVCache):
    """The layout of the native attention: sub-pages of 16 tokens, numbers in pairs; bfloat16 or int8.

    keys    [layers, pages, kv_heads, page_size / 16, head_dim / 2, 16, 2]   pairs of dimensions
    values  [layers, pages, kv_heads, page_size / 16, 8, head_dim, 2]        pairs of tokens
    scales  [layers, pages, kv_heads, page_size] float32, of keys and of values; of int8 only

    A page size that is no multiple of 16 leaves no room for sub-pages: keys and values are [layers, pages, kv_heads,
    page_size, head_dim], and the attention packs what it reads, which takes time but no bits.
    """

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: str) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys, values and int8 scales."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads)
        count, rest = divmod(page_size, SUBPAGE)
        keys: Part = (*shape, count, spec.head_dim // 2, SUBPAGE, 2), dtype
        values: Part = (*shape, count, SUBPAGE // 2, spec.head_dim, 2), dtype
        if rest:
            keys = values = (*shape, page_size, spec.head_dim), dtype
        scales = (*shape, page_size), "float32"
        return (keys, values, scales, scales) if dtype == "int8" else (keys, values)

    @classmethod
    def arrays_of(cls, device: str) -> ArrayLibrary:
        """Return the host's: the native attention takes addresses."""
        return HostArrays()
