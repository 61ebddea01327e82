"""Masks of allowed tokens, applied to the logits of all their rows in one operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def ban_others(logits: Tensor, allowed: AllowedTokens) -> None:
    """Set the logits of all other tokens of those rows to -inf, in place. Logits: [S, V]."""
    vocab_size = logits.shape[1]
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((allowed.bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    logits[allowed.indices] = logits[allowed.indices].masked_fill_(~is_allowed, -torch.inf)
