"""Token bitmasks: which tokens rows may take, applied to the logits of all these rows in one operation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# Tokens in a word of a mask.
WORD_BITS = 32


class TokenBitmask(msgspec.Struct, frozen=True):
    """Rows that may only take some tokens; n of them. They are where the logits are when they are applied.

    Attributes:
        indices: [n] int64, rows of the logits, none twice.
        bits: [n, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set where token t is allowed.
    """

    indices: Array
    bits: Array


def allows(mask: TokenBitmask, token_ids: Array) -> Array:
    """Return [n] bool: whether the mask of each row has its token of `token_ids` [n] int64."""
    rows = library_of(token_ids).arange(len(token_ids), "int64")
    words = mask.bits[rows, token_ids // WORD_BITS]
    return (words >> token_ids % WORD_BITS & 1) != 0


@np.errstate(all="ignore")
def apply_bitmask(logits: Array, mask: TokenBitmask, native: _native.Kernels | None = None) -> None:
    """Subtract infinity from the logits of all other tokens of those rows, in place: [S, V] float32.

    A NaN or infinite logit does not become finite, allowed or not.

    Args:
        native: kernels of this CPU, for the host's arrays.
    """
    if native is not None:
        _apply_natively(native, logits, mask)
        return
    xp, bits = library_of(logits), mask.bits
    clear_bits = clear_bits_by_bytes if isinstance(bits, np.ndarray) else clear_bits_by_words
    offsets = xp.astype(xp.where(clear_bits(bits, logits.shape[1]), -math.inf, 0.0), "float32")
    if len(mask.indices) == len(logits):  # all rows, in their order
        logits += offsets
    else:
        logits[mask.indices] += offsets


def clear_bits_by_bytes(bits: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.bool_]:
    """Return the bits of the host's [n, words] int32 as [n, count] bool, True where a bit is not set."""
    return np.unpackbits(~bits.view(np.uint8), axis=1, count=count, bitorder="little").view(np.bool_)


def clear_bits_by_words(bits: Array, count: int) -> Array:
    """Return the same on any device."""
    places = 1 << library_of(bits).arange(WORD_BITS, "int32")
    return ((bits[:, :, None] & places) == 0).reshape(len(bits), -1)[:, :count]


def _apply_natively(native: _native.Kernels, logits: Array, mask: TokenBitmask) -> None:
    rows, bits = mask.indices, mask.bits
    assert logits.dtype == np.float32 and logits.strides[1] == 4, "rows of float32 in one piece"
    assert rows.dtype == np.int64 and rows.flags.c_contiguous, "rows are int64"
    count, size = len(rows), logits.shape[1]
    assert bits.dtype == np.int32 and bits.flags.c_contiguous and bits.shape == (count, -(-size // 32)), "a bit a token"
    native.apply_token_bitmask(address(logits), logits.strides[0] // 4, size, count, address(rows), address(bits))
