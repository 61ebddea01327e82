"""Draws in plain torch, on the host: what a packed draw means. The C++ and Triton readers are tested against it.

Weights and their sums are float64; every operation treats each row by itself, so a row's token does not depend on the
others. Tokens are in one total order: larger logit first, equal logits by lower id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill.model.sampling.draws import NO_TOKEN, RECORD, Kind, PackedDraws
from tokenmill.model.sampling.draws import column as words
from tokenmill.model.sampling.ranking import finite, largest

# Logits handled at once: what stays in a CPU's cache, and is not fetched from the kernel anew in each step.
_PART_SIZE = 2**19


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Draw one token per row.

    Args:
        logits: [S, V] float32.
        draws: [S, NUM_FIELDS] int64, see `draws`.

    Returns:
        [S] int64; `NO_TOKEN` where a logit is NaN or +inf, or all are -inf. The drawn token shows it, without a pass
        over the logits: a NaN is taken for the largest number, which has all of the weight.
    """
    token_ids = torch.empty(len(draws), dtype=torch.int64)
    for kind, draw_rows in ((Kind.GREEDY, _greedy), (Kind.UNFILTERED, _unfiltered), (Kind.FILTERED, _filtered)):
        indices = (column(draws, "kind") == kind).nonzero().squeeze(1)
        for part in indices.split(max(1, _PART_SIZE // logits.shape[1])):
            if len(part):
                rows = logits if len(part) == len(logits) else logits[part]
                drawn = draw_rows(finite(rows), draws[part])
                is_number = rows.gather(1, drawn[:, None]).squeeze(1).isfinite()
                token_ids[part] = drawn.where(is_number, NO_TOKEN)
    return token_ids


def draw_on_host(logits: npt.NDArray[np.float32], draws: PackedDraws) -> npt.NDArray[np.int64]:
    """Draw one token per row of the host's arrays."""
    token_ids: npt.NDArray[np.int64] = draw(torch.from_numpy(logits), torch.from_numpy(draws)).numpy()
    return token_ids


def column(draws: Tensor, name: str) -> Tensor:
    """Return one field of packed draws [S, NUM_FIELDS]: [S] int64 or float64, a view."""
    return words(draws.view(torch.float64) if RECORD[name] == np.float64 else draws, name)


def _greedy(logits: Tensor, draws: Tensor) -> Tensor:
    return torch.from_numpy(logits.numpy().argmax(-1))  # several times faster than torch's own


def _unfiltered(logits: Tensor, draws: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature), in the order of the ids."""
    cumulative = _weights(logits, draws).cumsum(-1)
    return _pick(cumulative, draws).squeeze(1)


def _filtered(logits: Tensor, draws: Tensor) -> Tensor:
    """Draw from what min-p and top-k, and then top-p, leave, by rank."""
    top_k, top_p, min_p = (column(draws, name)[:, None] for name in ("top_k", "top_p", "min_p"))
    count = min(int(top_k.max()), logits.shape[1])
    values, token_ids = largest(logits, count)  # a stable sort, as far as it is needed
    weights = _weights(values, draws)
    is_kept = (weights >= min_p) & (torch.arange(count) < top_k)
    cumulative = weights.where(is_kept, 0.0).cumsum(-1)
    before = cumulative.roll(1, -1)
    before[:, 0] = 0.0
    is_kept &= (before < top_p * cumulative[:, -1:]) | (top_p >= 1.0)
    return token_ids.gather(1, _pick(weights.where(is_kept, 0.0).cumsum(-1), draws)).squeeze(1)


def _weights(logits: Tensor, draws: Tensor) -> Tensor:
    """Return exp((logit - the row's largest) / temperature), [n, V] float64."""
    highest = logits.amax(-1, keepdim=True)
    return ((logits.to(torch.float64) - highest) / column(draws, "temperature")[:, None]).exp_()


def _pick(cumulative: Tensor, draws: Tensor) -> Tensor:
    """Return the first place where the cumulative weight exceeds the uniform's share, [n, 1]; never one of weight 0."""
    total = cumulative[:, -1:]
    place = (cumulative <= column(draws, "uniform")[:, None] * total).sum(-1, keepdim=True)
    return torch.minimum(place, (cumulative < total).sum(-1, keepdim=True))
