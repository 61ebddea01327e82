"""The layout of the KV cache for the native attention, in the host's memory."""

from __future__ import annotations

from tokenmill.model.attention.protocol import AttentionSpec, KVCache, Part
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.host_arrays import HostArrays

SUBPAGE = 16
MIXED = {"int8-int4": ("int8", "int4")}
"""Types of a cache whose keys and values differ."""


class PackedKV(KVCache):
    """The layout of the native attention: sub-pages of 16 tokens, numbers in pairs; bfloat16, int8 or int4.

    keys    [layers, pages, kv_heads, page_size / 16, head_dim / 2, 16, 2]      pairs of dimensions
    values  [layers, pages, kv_heads, page_size / 16, 8, head_dim, 2]           pairs of tokens
    int4: keys    [layers, pages, kv_heads, page_size / 16, head_dim / 8, 16, 4]     bytes, 4 pairs in two of them
          values  [layers, pages, kv_heads, page_size / 16, 2, head_dim, 2, 2]       bytes, of 4 pairs of tokens
    scales  [layers, pages, kv_heads, page_size] float32, of keys and of values, unless they are bfloat16

    A page size that is no multiple of 16 leaves no room for sub-pages: keys and values are [layers, pages, kv_heads,
    page_size, head_dim], and the attention packs what it reads, which takes time but no bits.
    """

    @classmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: str) -> tuple[Part, ...]:
        """Return the shapes and dtypes of keys, values and their scales; int4 is bytes of two numbers."""
        shape = (spec.num_layers, num_pages, spec.num_kv_heads)
        count, rest = divmod(page_size, SUBPAGE)
        size = spec.head_dim
        key_dtype, value_dtype = MIXED.get(dtype, (dtype, dtype))
        keys = _part((*shape, count, size // 2, SUBPAGE, 2), (*shape, count, size // 8, SUBPAGE, 4), key_dtype)
        values = _part((*shape, count, SUBPAGE // 2, size, 2), (*shape, count, 2, size, 2, 2), value_dtype)
        if rest:
            plain, halved = (*shape, page_size, size), (*shape, page_size, size // 2)
            keys, values = _part(plain, halved, key_dtype), _part(plain, halved, value_dtype)
        scales = (*shape, page_size), "float32"
        return (keys, values, scales, scales) if dtype in ("int8", "int4", *MIXED) else (keys, values)

    @classmethod
    def arrays_of(cls, device: str) -> ArrayLibrary:
        """Return the host's: the native attention takes addresses."""
        return HostArrays()


def _part(shape: tuple[int, ...], in_bytes: tuple[int, ...], dtype: str) -> Part:
    return (in_bytes, "uint8") if dtype == "int4" else (shape, dtype)
