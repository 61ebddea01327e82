"""Keys of pages that outlive a process: 128 bits for a page, all pages before it, and whose KV they are.

Unlike the names of pages (`core/page_names.py`), which only tell where to look, these find content. So they come from
a cryptographic hash, and a lookup compares the page's tokens too.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from tokenmill.core.page_names import key_parts
from tokenmill.core.request import CacheKey, TokenArray

KEY_BYTES = 16


def page_keys(key: CacheKey, tokens: TokenArray, page_size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the tokens (int32, as bytes) of each whole page of `tokens`, in order."""
    # Their lengths keep two parts from being taken for two others.
    parts = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in key_parts(key))
    before = blake2b(parts, digest_size=KEY_BYTES).digest()
    data, size = tokens.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(0, len(data) - size + 1, size):
        page = data[start : start + size]
        before = blake2b(before + page, digest_size=KEY_BYTES).digest()
        yield before, page
