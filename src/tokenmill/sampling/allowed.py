"""Masks of allowed tokens, applied to the logits of all their rows in one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenmill.kernels import native_ops

if TYPE_CHECKING:
    from tokenmill import _native

# Tokens in a word of a mask.
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may only take some tokens; n of them.

    Attributes:
        indices: [n] int64, rows of the logits.
        bits: [n, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set where token t is allowed.
    """

    indices: Tensor
    bits: Tensor


def ban_others(logits: Tensor, allowed: AllowedTokens, native: _native.Kernels | None = None) -> None:
    """Set the logits of all other tokens of those rows to -inf, in place. Logits: [S, V] float32."""
    if native is not None:
        native_ops.ban(native, logits, allowed.indices, allowed.bits)
        return
    clear_bits = clear_bits_by_numpy if logits.device.type == "cpu" else clear_bits_by_torch
    is_banned = clear_bits(allowed.bits, logits.shape[1])
    if len(allowed.indices) == len(logits):  # all rows, in their order
        logits.masked_fill_(is_banned, -torch.inf)
    else:
        logits[allowed.indices] = logits[allowed.indices].masked_fill_(is_banned, -torch.inf)


def clear_bits_by_numpy(bits: Tensor, count: int) -> Tensor:
    """[n, words] int32 on the CPU -> [n, count] bool, True where a bit is not set."""
    flags = np.unpackbits(~bits.numpy().view(np.uint8), axis=1, count=count, bitorder="little")
    return torch.from_numpy(flags).view(torch.bool)


def clear_bits_by_torch(bits: Tensor, count: int) -> Tensor:
    """The same on any device."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :count] == 0
