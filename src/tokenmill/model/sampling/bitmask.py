"""Token bitmasks: which tokens rows may take, applied to the logits of all these rows in one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# Tokens in a word of a mask.
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """Rows that may only take some tokens; n of them. They are where the logits are when they are applied.

    Attributes:
        indices: [n] int64, rows of the logits, none twice.
        bits: [n, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set where token t is allowed.
    """

    indices: Array
    bits: Array


def allows(mask: TokenBitmask, token_ids: Tensor) -> Tensor:
    """Return [n] bool: whether the mask of each row has its token of `token_ids` [n] int64."""
    bits: Tensor = mask.bits
    words = bits.gather(1, token_ids[:, None] // WORD_BITS).squeeze(1)
    return (words >> token_ids % WORD_BITS & 1).bool()


def apply_bitmask(logits: Tensor, mask: TokenBitmask, native: _native.Kernels | None = None) -> None:
    """Subtract infinity from the logits of all other tokens of those rows, in place: [S, V] float32.

    A NaN or infinite logit does not become finite, allowed or not.
    """
    if native is not None:
        _apply_natively(native, logits, mask)
        return
    clear_bits = clear_bits_by_numpy if logits.device.type == "cpu" else clear_bits_by_torch
    offsets = torch.where(clear_bits(mask.bits, logits.shape[1]), -torch.inf, 0.0)
    if len(mask.indices) == len(logits):  # all rows, in their order
        logits += offsets
    else:
        logits[mask.indices] += offsets


def clear_bits_by_numpy(bits: Tensor, count: int) -> Tensor:
    """Return the bits of [n, words] int32 on the CPU as [n, count] bool, True where a bit is not set."""
    flags = np.unpackbits(~bits.numpy().view(np.uint8), axis=1, count=count, bitorder="little")
    return torch.from_numpy(flags).view(torch.bool)


def clear_bits_by_torch(bits: Tensor, count: int) -> Tensor:
    """Return the same on any device."""
    places = (1 << torch.arange(WORD_BITS, device=bits.device)).to(torch.int32)
    return ((bits[:, :, None] & places) == 0).flatten(1)[:, :count]


def _apply_natively(native: _native.Kernels, logits: Tensor, mask: TokenBitmask) -> None:
    rows: Tensor = mask.indices
    bits: Tensor = mask.bits
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32 in one piece"
    assert rows.dtype == torch.int64 and rows.is_contiguous(), "rows are int64"
    count, size = len(rows), logits.shape[1]
    assert bits.dtype == torch.int32 and bits.is_contiguous() and bits.shape == (count, -(-size // 32)), "a bit a token"
    native.apply_token_bitmask(logits.data_ptr(), logits.stride(0), size, count, rows.data_ptr(), bits.data_ptr())
