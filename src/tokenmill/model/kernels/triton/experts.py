"""Experts as one stacked weight with grouped products: nothing is copied to the host, so a graph can capture them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.protocol import ExpertBiases, Gate, LinearWeight
from tokenmill.model.kernels.triton.expert_matrices import ExpertMatrices
from tokenmill.model.kernels.triton.gate import gated
from tokenmill.model.kernels.triton.matmul import Groups

# Pairs of a program that places them, and those that it compares them with at once.
PAIRS, COMPARED = 32, 128
# Above, sorting them takes less than comparing each with each.
MOST_COMPARED = 4096
# Columns of a program that sums experts.
COLUMNS = 512


class StackedExperts:
    """`Experts` whose matrices are stacked for grouped products."""

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        self.biases = biases
        self._gate = gate
        self._gate_up = gate_up
        self._down = down
        self._bounds = torch.arange(len(down.numbers) + 1, device=down.numbers.device)

    @property
    def gate_up(self) -> Sequence[LinearWeight]:
        """Gate and up matrices of the experts: views of the stacked weight."""
        return self._gate_up.of_each

    @property
    def down(self) -> Sequence[LinearWeight]:
        """Down matrices of the experts: views of the stacked weight."""
        return self._down.of_each

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run x through one expert."""
        first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
        sums = self.gate_up[expert].multiply(x, first)
        return self.down[expert].multiply(gated(sums, self._gate), second)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, in their order: five launches for the tokens of decodes."""
        places, groups = self._rows_of(experts)
        first, second = self.biases or (None, None)
        sums = self._gate_up.multiply(x, groups, first)
        own = msgspec.structs.replace(groups, sources=None)
        outer = self._down.multiply(gated(sums, self._gate), own, second)
        output = torch.empty_like(x)
        if len(x):
            grid = len(x), triton.cdiv(x.shape[1], COLUMNS)
            sizes = x.shape[1], experts.shape[1], triton.next_power_of_2(experts.shape[1]), COLUMNS
            _sum_experts[grid](outer, weights.contiguous(), experts.contiguous(), places, output, *sizes)
        return output

    def _rows_of(self, experts: torch.Tensor) -> tuple[torch.Tensor, Groups]:
        """Return the row of each pair of a token and one of its experts, by expert, then by token; and the rows."""
        num_pairs, num_experts = experts.numel(), len(self._bounds) - 1
        if num_pairs > MOST_COMPARED:
            grouped, order = experts.flatten().sort(stable=True)
            starts = torch.searchsorted(grouped, self._bounds, out_int32=True)
            places = torch.empty_like(order).index_copy_(0, order, torch.arange(num_pairs, device=order.device))
            return places, Groups(starts, grouped.to(torch.int32), order // experts.shape[1])
        places, sources = torch.empty(2, num_pairs, dtype=torch.int64, device=experts.device)
        starts, of_rows = torch.empty(num_experts + 1 + num_pairs, dtype=torch.int32, device=experts.device).split(
            [num_experts + 1, num_pairs]
        )
        programs = triton.cdiv(num_pairs, PAIRS) + triton.cdiv(num_experts + 1, PAIRS)
        _place_pairs[(programs,)](
            *(experts.contiguous(), places, sources, of_rows, starts, num_pairs, num_experts, experts.shape[1]),
            *(PAIRS, COMPARED),
        )
        return places, Groups(starts, of_rows, sources)


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "count"],
    do_not_specialize_on_alignment=["experts", "places", "sources", "groups", "starts"],
)
def _place_pairs(
    experts,
    places,
    sources,
    groups,
    starts,
    num_pairs,
    num_experts,
    count,
    PAIRS: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Give each pair of a token and an expert its row, and each expert its first row, by counting the pairs in front.

    Programs of pairs come first, then those of experts. Each reads all pairs, 8 bytes each: where these are few, that
    is less than the launches of a sort take.
    """
    block = tl.program_id(0)
    is_expert = block >= tl.cdiv(num_pairs, PAIRS)
    own = tl.where(is_expert, block - tl.cdiv(num_pairs, PAIRS), block) * PAIRS + tl.arange(0, PAIRS)
    is_pair = (own < num_pairs) & (is_expert == 0)
    expert = tl.where(is_expert, own, tl.load(experts + own, is_pair, 0).to(tl.int32))
    # No pair of an expert itself is in front of its first row.
    ties = tl.where(is_expert, 0, own)
    row = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, COMPARED):
        pair = first + tl.arange(0, COMPARED)
        other = tl.load(experts + pair, pair < num_pairs, num_experts).to(tl.int32)
        is_tie = (other[None, :] == expert[:, None]) & (pair[None, :] < ties[:, None])
        row += tl.sum(((other[None, :] < expert[:, None]) | is_tie).to(tl.int32), 1)
    tl.store(places + own, row.to(tl.int64), is_pair)
    tl.store(sources + row, (own // count).to(tl.int64), is_pair)
    tl.store(groups + row, expert, is_pair)
    tl.store(starts + own, row, (own <= num_experts) & (is_expert != 0))


@triton.jit(do_not_specialize_on_alignment=["experts", "places", "weights"])
def _sum_experts(
    outer,
    weights,
    experts,
    places,
    output,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a token's experts, weighted, in the order of their numbers, whatever order the router has."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, WIDTH)
    expert = tl.load(experts + token * COUNT + slot, slot < COUNT, 1 << 30)
    place = tl.load(places + token * COUNT + slot, slot < COUNT, 0)
    weight = tl.load(weights + token * COUNT + slot, slot < COUNT, 0.0).to(tl.float32)
    rank = tl.sum((expert[None, :] < expert[:, None]).to(tl.int32), 1)
    total = tl.zeros([COLUMNS], tl.float32)
    for turn in tl.static_range(COUNT):
        row = tl.sum(tl.where(rank == turn, place, 0), 0)
        factor = tl.sum(tl.where(rank == turn, weight, 0.0), 0)
        total += factor * tl.load(outer + row * SIZE + column, column < SIZE, 0.0).to(tl.float32)
    tl.store(output + token * SIZE + column, total.to(output.dtype.element_ty), column < SIZE)
