"""Expert parallelism: whole experts on ranks, tokens with all, outputs summed in the order of one rank alone."""

from __future__ import annotations

from itertools import pairwise

import torch

from tokenmill.model.kernels.protocol import Experts
from tokenmill.model.sharding.collective import Collective
from tokenmill.model.sharding.shard import Part


class SharedExperts:
    """A layer's experts, of which some are this rank's.

    Sorted by expert, the rows that a rank computes stand together. So ranks gather rows, and each adds up all of them,
    expert after expert, as `LoopedExperts` does: the same bits.

    Args:
        own: this rank's experts. part: their place among all.
    """

    __slots__ = ("_collective", "own", "part")

    def __init__(self, own: Experts, part: Part, collective: Collective) -> None:
        self.own = own
        self.part = part
        self._collective = collective

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, gather the rows of all ranks, and add them up for each token."""
        order = experts.flatten().argsort(stable=True)
        tokens, scales = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
        counts = torch.bincount(experts.flatten(), minlength=self.part.total)
        ends = [0, *counts.cumsum(0).tolist()]
        mine = slice(ends[self.part.start], ends[self.part.stop])
        inputs, outputs = x[tokens[mine]], x.new_empty(mine.stop - mine.start, x.shape[1])
        for number in range(self.part.count):
            expert = self.part.start + number
            rows = slice(ends[expert] - mine.start, ends[expert + 1] - mine.start)
            if rows.start < rows.stop:
                torch.mul(self.own.one(number, inputs[rows]), scales[mine][rows], out=outputs[rows])
        all_outputs = self._collective.rows(outputs, mine, len(order))
        result = torch.zeros_like(x)
        for start, end in pairwise(ends):
            if start < end:
                result.index_add_(0, tokens[start:end], all_outputs[start:end])
        return result
