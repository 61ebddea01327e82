"""Tokens by rank: larger logit first, equal ones by id; the head of a stable sort, found without sorting the rest.

That is the one order everywhere in sampling. bfloat16 models give many equal logits, and an order that left them open
would let the batch or the device decide. Knows no parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Smaller vocabularies are not worth the grouping.
_MIN_GROUPED_VOCABULARY = 2048
_LOW_WORD = 0xFFFFFFFF
LARGEST = torch.finfo(torch.float32).max


def finite(logits: Tensor) -> Tensor:
    """Return `logits` with -inf as the smallest float, NaN and +inf as the largest: differences of any two are not NaN.

    A NaN or an infinity then has all of the weight, so the drawn token shows it.
    """
    return logits.nan_to_num(nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` tokens of each row in the total order.

    Args:
        logits: [S, V] float32, finite.
        count: 1..V.

    Returns:
        values [S, count] float32 and token ids [S, count] int64.
    """
    vocab_size = logits.shape[1]
    if count == vocab_size:
        return torch.sort(logits, descending=True, stable=True)
    width = 1 if vocab_size < _MIN_GROUPED_VOCABULARY else _group_width(vocab_size, count)
    if width == 1:
        keys = _keys(logits, torch.arange(vocab_size, device=logits.device))
    else:
        keys = _keys_of_best_groups(logits, width, count)
    token_ids = _index(torch.topk(keys, count).values)
    return logits.gather(1, token_ids), token_ids


def _keys_of_best_groups(logits: Tensor, width: int, count: int) -> Tensor:
    """Return keys of all tokens in the best `count` groups, [S, groups * width].

    A token outside of them has `count` tokens before it, the maximum of each of these groups: groups are ordered as
    tokens are, and of two groups with equal maxima the one with the lower index holds the lower ids.
    """
    vocab_size = logits.shape[1]
    maxima = _group_maxima(logits, width)
    group_keys = _keys(maxima, torch.arange(maxima.shape[1], device=logits.device))
    groups = _index(torch.topk(group_keys, min(count, maxima.shape[1]), sorted=False).values)
    ids = (groups[:, :, None] * width + torch.arange(width, device=logits.device)).flatten(1)
    keys = _keys(logits.gather(1, ids.clamp(max=vocab_size - 1)), ids)
    return keys.masked_fill_(ids >= vocab_size, torch.iinfo(torch.int64).min)


def _group_maxima(logits: Tensor, width: int) -> Tensor:
    vocab_size = logits.shape[1]
    rest = vocab_size % width
    maxima = logits[:, : vocab_size - rest].view(len(logits), -1, width).amax(-1)
    return torch.cat([maxima, logits[:, vocab_size - rest :].amax(-1, keepdim=True)], dim=1) if rest else maxima


def _group_width(vocab_size: int, count: int) -> int:
    """Return the power of two that balances V / width maxima against count * width gathered tokens."""
    return 1 << max(0, round(math.log2(vocab_size / count) / 2))


def _keys(values: Tensor, indices: Tensor) -> Tensor:
    """Return int64 keys, larger for larger values, and for lower indices among equal values; no two are equal."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, to which it is equal.
    # Of negative floats the larger one has the smaller magnitude: flip it, and integer order is float order.
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(torch.int64) << 32) | (_LOW_WORD - indices)


def _index(keys: Tensor) -> Tensor:
    return _LOW_WORD - (keys & _LOW_WORD)
