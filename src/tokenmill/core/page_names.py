"""Names of KV pages: one number for a page's tokens, all tokens before them and the cache key that they begin with.

Every process of a server, and every server, gives a prefix the same name, so that a prompt can be sent where its pages
are. A name is a hash: if two prefixes share one, a decision by names may be a bad choice, but is never an error. The
pages that a request reads are found by the tokens themselves.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import CacheKey, TokenArray

# Odd, so it has an inverse modulo 2^64: the names of all pages of a prompt come from one sum, without a loop over them.
_FACTOR = 0x5851F42D4C957F2D
_MOST_TOKENS = 256


def key_parts(key: CacheKey) -> tuple[str, ...]:
    """Return the parts of a key that page names begin with; without an adapter, the adapter's part is left out."""
    return key if key.adapter else key[:2]


def first_name(key: CacheKey) -> int:
    """Return the number that stands for the name of the page before the first."""
    return int.from_bytes(blake2b("/".join(key_parts(key)).encode(), digest_size=8).digest(), "little", signed=True)


def page_names(tokens: TokenArray, page_size: int, before: int) -> list[int]:
    """Return the names of the full pages of `tokens`, which follow the page named `before`: signed, of 64 bits.

    name[i] = factor * name[i - 1] + mix(page[i]), all modulo 2^64.
    """
    count = len(tokens) // page_size
    pages = tokens[: count * page_size].reshape(count, page_size).astype(np.uint64)
    terms = _mix(pages @ _WEIGHTS[:page_size]) * _powers(pow(_FACTOR, -1, 1 << 64), count)
    names = _powers(_FACTOR, count) * (np.cumsum(terms) + np.uint64(before % (1 << 64)))
    found: list[int] = names.view(np.int64).tolist()
    return found


def _powers(factor: int, count: int) -> npt.NDArray[np.uint64]:
    return np.multiply.accumulate(np.full(count, factor, np.uint64))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix a word so that each of its bits depends on all of them (the finalizer of SplitMix64; Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_WEIGHTS = _mix(np.arange(1, _MOST_TOKENS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
