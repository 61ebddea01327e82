"""The exact filtered draw for a row whose support may be long: radix selection instead of a sort.

Tokens are binned by how far they lie below the largest logit; counts and weights per bin tell in which bin a rank or a
cumulative weight falls, and only that bin is sorted. For few rows: flat distributions under top-p, a top-k in the
hundreds, a tiny min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_BINS = 4096
_BINS_PER_NAT = 128.0


@dataclass(frozen=True, slots=True)
class WideDraw:
    """Parameters of one row's draw; `top_k` is the size of the vocabulary where it is off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def draw_wide(logits: Tensor, how: WideDraw) -> Tensor:
    """Draw from what min-p, top-k and top-p leave of a row, in rank order.

    Args:
        logits: [V] float32, finite.

    Returns:
        The token id, an int64 scalar tensor.
    """
    scaled = (logits.to(torch.float64) - logits.max()) / how.temperature
    ranking = _Ranking(scaled, how.min_p)
    count = min(how.top_k, ranking.size)
    if how.top_p < 1.0:
        nucleus = how.top_p * ranking.weight_of_first(count)
        count = min(count, 1 + ranking.find(nucleus, right=False)[0])
    return ranking.find(how.uniform * ranking.weight_of_first(count), right=True)[1]


class _Ranking:
    """Tokens of a weight of at least `min_p`, in the order larger first, then lower id."""

    def __init__(self, scaled: Tensor, min_p: float) -> None:
        self._scaled = scaled
        self._weights = scaled.exp()
        self._bins = (scaled * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).to(torch.int64)
        if min_p > 0.0:
            self._bins.masked_fill_(self._weights < min_p, _NUM_BINS)  # one bin more, which nobody looks into
        counts = torch.bincount(self._bins, minlength=_NUM_BINS + 1)[:_NUM_BINS]
        weights = torch.bincount(self._bins, self._weights, minlength=_NUM_BINS + 1)[:_NUM_BINS]
        self._counts, self._cumulative = counts.cumsum(0), weights.cumsum(0)
        self.size = int(self._counts[-1])

    def weight_of_first(self, count: int) -> float:
        """Weight of the first `count` tokens."""
        if count == self.size:
            return float(self._cumulative[-1])
        bin_index = int((self._counts < count).sum())
        _, cumulative = self._sorted_bin(bin_index)
        return float(cumulative[count - self._count_before(bin_index) - 1])

    def find(self, weight: float, right: bool) -> tuple[int, Tensor]:
        """Rank and id of the first token at which the cumulative weight reaches `weight`; `right`: exceeds it."""
        bin_index = _reach(self._cumulative, weight, right)
        ids, cumulative = self._sorted_bin(bin_index)
        place = _reach(cumulative, weight, right)
        return self._count_before(bin_index) + place, ids[place]

    def _count_before(self, bin_index: int) -> int:
        return int(self._counts[bin_index - 1]) if bin_index else 0

    def _sorted_bin(self, bin_index: int) -> tuple[Tensor, Tensor]:
        """Ids of a bin in rank order, and the cumulative weight up to and with each of them."""
        ids = (self._bins == bin_index).nonzero().squeeze(1)
        ids = ids[torch.sort(self._scaled[ids], descending=True, stable=True).indices]
        before = self._cumulative[bin_index - 1] if bin_index else 0.0
        return ids, self._weights[ids].cumsum(0) + before


def _reach(cumulative: Tensor, weight: float, right: bool) -> int:
    """First index at which the cumulative weight reaches (`right`: exceeds) a weight.

    Rounding may put the weight just past the sum of all: the last that has any weight stands for it.
    """
    below = cumulative <= weight if right else cumulative < weight
    return min(int(below.sum()), int((cumulative < cumulative[-1]).sum()))
