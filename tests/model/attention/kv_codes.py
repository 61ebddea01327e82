"""KV in 4 bits, spelled out: levels, rotation and the layout of codes; the slow model of native/isa/kv_codes.h and
kv_rotation.h."""

from __future__ import annotations

import torch

HALF = torch.tensor([6.0, 18, 30, 43, 58, 74, 95, 126])
LEVELS = torch.cat((-HALF.flip(0), HALF))


def hadamard(head_dim: int) -> torch.Tensor:
    """The rotation of a head, [head_dim, head_dim]: in blocks of the largest power of two that divides its size."""
    block = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix / block**0.5] * (head_dim // block))


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """Heads [..., head_dim] rotated; twice is once and back."""
    return (heads.double() @ hadamard(heads.shape[-1])).float()


def encoded(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., head_dim] and scales [...] of heads: of some scales the one with the least error, fitted."""
    x = rotated(heads)
    root = x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    codes, scales, least = torch.zeros_like(x, dtype=torch.int64), torch.zeros(x.shape[:-1]), None
    for share in (0.85, 1.0, 1.15, 1.35):
        tried = torch.bucketize(x / root * 46 / share, (LEVELS[1:] + LEVELS[:-1]) / 2)
        levels = LEVELS[tried]
        scale = (x * levels).sum(-1) / levels.square().sum(-1)
        error = (x - levels * scale[..., None]).square().sum(-1)
        is_better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        codes, scales = torch.where(is_better[..., None], tried, codes), torch.where(is_better, scale, scales)
        least = torch.where(is_better, error, error if least is None else least)
    return codes, scales


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Heads of codes and scales, in float32, rotated back."""
    return rotated(LEVELS[codes.long()] * scales[..., None])


def unpacked(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the packed cache [layers, pages, heads, ...] as [layers, pages, heads, page_size, head_dim]."""
    if keys.ndim == 5:  # no sub-pages: two numbers of a token in each byte
        return tuple(torch.stack((part & 15, part >> 4), -1).flatten(-2) for part in (keys, values))  # type: ignore[return-value]
    # Two bytes of a word are four rows. Keys: [dims / 8, token, parity of the dimension, row].
    of_keys = _rows(keys.unflatten(-1, (2, 2)))
    keys = of_keys.permute(0, 1, 2, 3, 5, 4, 7, 6).flatten(5).flatten(3, 4)
    # Values: [quad, dimension, parity of the token, row]; the token is 8 quad + 2 row + parity.
    values = _rows(values).permute(0, 1, 2, 3, 4, 7, 6, 5).flatten(4, 6).flatten(3, 4)
    return keys, values


def packed(keys: torch.Tensor, values: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `unpacked`."""
    if page_size % 16:
        return tuple(_bytes(part.unflatten(-1, (-1, 2))).squeeze(-1) for part in (keys, values))  # type: ignore[return-value]
    of_keys = keys.unflatten(3, (-1, 16)).unflatten(-1, (-1, 4, 2)).permute(0, 1, 2, 3, 5, 4, 7, 6)
    of_values = values.unflatten(3, (-1, 2, 4, 2)).permute(0, 1, 2, 3, 4, 7, 6, 5)
    return _bytes(of_keys).flatten(-2), _bytes(of_values)


def _rows(words: torch.Tensor) -> torch.Tensor:
    """The nibbles of words of two bytes [..., 2], [..., 4]."""
    return torch.stack((words & 15, words >> 4), -1).flatten(-2)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    low, high = rows.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)
