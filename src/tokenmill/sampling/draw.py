"""Inverse-CDF draws for many rows at once: from the whole vocabulary, and from a candidate list.

Sums over many tokens are kept in float64; a token of weight 0 is never drawn, however close to 1 the uniform is.
Every operation treats each row by itself, in an order that does not depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.batch import DrawGroup
from tokenmill.sampling.candidates import MAX_CANDIDATES, largest
from tokenmill.sampling.weights import GROUP_WIDTH, cumulative_group_weights, relative_weights


def draw_plain(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature) in the order of the ids, in two levels: a group, then a token in it.

    Args:
        logits: [n, V] float32, finite.
        temperature, uniform: [n] float64.

    Returns:
        [n] int64 token ids.
    """
    vocab_size = logits.shape[1]
    weights = relative_weights(logits, temperature)
    cumulative = cumulative_group_weights(weights)
    target = uniform[:, None] * cumulative[:, -1:]
    group = _first_above(cumulative, target)
    below = _exclusive(cumulative).gather(1, group)
    ids = group * GROUP_WIDTH + torch.arange(GROUP_WIDTH, device=logits.device)
    members = weights.gather(1, ids.clamp(max=vocab_size - 1)).to(torch.float64)
    members.masked_fill_(ids >= vocab_size, 0.0)
    place = _first_above(members.cumsum(-1), target - below)
    return ids.gather(1, place).squeeze(1)


def draw_filtered(logits: Tensor, group: DrawGroup, within_candidates: bool) -> tuple[Tensor, Tensor]:
    """Draw from what min-p, top-k and top-p leave, in the order of the candidates.

    Args:
        logits: [n, V] float32, finite; the rows of `group` only.
        within_candidates: the host knows that each row's top-k fits into the candidate list.

    Returns:
        [n] int64 token ids, and [n] bool: whether the candidates held all that the filters leave. Where they did not,
        the id means nothing.
    """
    values, token_ids = largest(logits, min(MAX_CANDIDATES, logits.shape[1]))
    weights = ((values.to(torch.float64) - values[:, :1]) / group.temperature[:, None]).exp_()
    above_min_p = weights >= group.min_p[:, None]
    ranks = torch.arange(weights.shape[1], device=logits.device)
    weights = weights.where(above_min_p & (ranks < group.top_k[:, None]), 0.0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    is_complete = (group.top_k <= weights.shape[1]) | ~above_min_p[:, -1]
    if not within_candidates:
        # The weight of the whole vocabulary costs a pass over it; only top-p without the other filters asks for it.
        needs_total = ~is_complete & (group.min_p <= 0.0)
        total = _complete_totals(total, logits, group.temperature, needs_total)
        is_complete |= needs_total & (total * group.top_p <= cumulative[:, -1])

    nucleus = (group.top_p * total)[:, None]
    in_nucleus = (_exclusive(cumulative) < nucleus) | (group.top_p >= 1.0)[:, None]
    cumulative = weights.where(in_nucleus, 0.0).cumsum(-1)
    place = _first_above(cumulative, group.uniform[:, None] * cumulative[:, -1:])
    return token_ids.gather(1, place).squeeze(1), is_complete


def _complete_totals(totals: Tensor, logits: Tensor, temperature: Tensor, wanted: Tensor) -> Tensor:
    """`totals` [n] with the weight of the whole vocabulary in the rows that `wanted` [n] bool names."""
    rows = wanted.nonzero().squeeze(1)
    if not len(rows):
        return totals
    chosen = logits if len(rows) == len(logits) else logits[rows]
    return totals.index_copy(0, rows, cumulative_group_weights(relative_weights(chosen, temperature[rows]))[:, -1])


def _exclusive(cumulative: Tensor) -> Tensor:
    """The cumulative weight before each place."""
    return torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], dim=1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index at which the cumulative weight exceeds the target, [n, 1] int64; never one past the last weight."""
    place = (cumulative <= target).sum(-1, keepdim=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(place, last)
