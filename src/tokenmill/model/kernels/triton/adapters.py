"""Add adapters to a product on a GPU: y += scale * (x A^T) B^T, for rows in any order, each with its own slot.

Adapters have slots of fixed size, so that a graph can capture the work: a row's slot is read on the device, and a row
without one leaves at once. Each row is multiplied by programs of its own (the batched gather of matrices and vectors
of Punica, Chen et al. 2023): sums are in float32 and in one order, whatever rows are beside it. The rows of a prompt
with an adapter read it from the L2 cache again and again.

Estimate, not measured: for 8 rows with 8 adapters of rank 16, a matrix of 1,024 to 4,096 reads 1.3 MB, 0.3 us on an
H200; its two launches cost 2 us, so that all matrices of Qwen3-0.6B cost about 0.25 ms a step outside of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.adapter_parts import AdapterModule

# Rows of A, and numbers of each, that a program takes at once; and outputs.
_RANKS, _WIDTH, _OUTPUTS = 16, 256, 64
MOST_PARTS = 3
"""Projections of a fused matrix: q, k and v."""


@triton.jit
def _shrink(x, stride, a, slot_of_row, inner, ranks, size, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute inner [T, ranks] float32 = x A^T."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_row + token).to(tl.int64)
    if slot < 0:
        return
    rows = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    a += (slot * ranks + rows[:, None]) * size
    sums = tl.zeros([RANKS], tl.float32)
    for start in range(0, size, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = columns < size
        values = tl.load(x + token * stride + columns, inside, 0.0).to(tl.float32)
        weights = tl.load(a + columns[None, :], (rows[:, None] < ranks) & inside[None, :], 0.0).to(tl.float32)
        sums += tl.sum(weights * values[None, :], 1)
    tl.store(inner + token * ranks + rows, sums, rows < ranks)


@triton.jit
def _expand(
    inner, b, scales, slot_of_row, y, stride, size, second, third,
    PARTS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Compute y [T, size] += scale * inner B^T; outputs of the second and third part begin at `second` and `third`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_row + token).to(tl.int64)
    if slot < 0:
        return
    columns = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = columns < size
    part = (columns >= second).to(tl.int32) + (columns >= third).to(tl.int32)
    ranks = tl.arange(0, RANK)
    own = tl.load(inner + token * PARTS * RANK + part[:, None] * RANK + ranks[None, :], inside[:, None], 0.0)
    weights = tl.load(b + (slot * size + columns[:, None]) * RANK + ranks[None, :], inside[:, None], 0.0)
    added = tl.sum(own * weights.to(tl.float32), 1) * tl.load(scales + slot * PARTS + part, inside, 0.0)
    before = tl.load(y + token * stride + columns, inside, 0.0)
    tl.store(y + token * stride + columns, (before.to(tl.float32) + added).to(before.dtype), inside)


class _Slots:
    """The B of adapters of one matrix, each in its slot, and their scales. A slot must be filled before a row uses it.

    Args:
        rank: the largest rank of an adapter; rounded up to a power of two.
        parts: first output and number of outputs of each projection in the matrix, in their order.
        like: a tensor with the dtype and the device of the weights.
    """

    _a: torch.Tensor

    def __init__(self, num_slots: int, rank: int, parts: Sequence[tuple[int, int]], like: torch.Tensor) -> None:
        assert 0 < len(parts) <= MOST_PARTS, "as many projections as the kernel tells apart"
        self._parts = list(parts)
        self._rank = triton.next_power_of_2(rank)
        self._b = like.new_zeros(num_slots, sum(count for _, count in parts), self._rank)
        self._scales = like.new_zeros(num_slots, len(parts), dtype=torch.float32)
        # By slot, itself where its adapter has this matrix; the last one stands for rows without an adapter, -1.
        self._holders = like.new_full((num_slots + 1,), -1, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots in bytes."""
        return sum(tensor.nbytes for tensor in (self._a, self._b, self._scales, self._holders))

    def fill(self, slot: int, modules: Sequence[AdapterModule]) -> None:
        """Replace a slot's content by an adapter's modules of this matrix; without modules the slot adds nothing."""
        self._holders[slot] = slot if modules else -1
        for tensor in (self._a, self._b, self._scales):
            tensor[slot].zero_()
        for module in modules:
            (part,) = (number for number, (start, _) in enumerate(self._parts) if start == module.start)
            (columns, rank), first = module.b.shape, part * self._rank
            self._place_of_a(slot, first, rank).copy_(module.a, non_blocking=True)
            self._b[slot, module.start : module.start + columns, :rank].copy_(module.b, non_blocking=True)
            self._scales[slot, part] = module.scale

    def holding(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots whose adapters have this matrix, and -1 for others: where few do, all others leave at once.

        Args:
            slots: [T] int32, slot of each row; -1 without an adapter.
        """
        return self._holders[slots]

    def _place_of_a(self, slot: int, first: int, rank: int) -> torch.Tensor:
        """Return the memory of rows [first, first + rank) of a slot's A, [rank, in_size]."""
        return self._a[slot, first : first + rank]

    def _expand(self, inner: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Add scale * inner B^T to y [T, out_size] in place and return y; `inner`: [T, parts * rank] float32."""
        assert y.stride(1) == 1, "rows are in one piece"
        out_size = self._b.shape[1]
        starts = [start for start, _ in self._parts[1:]] + [out_size] * (MOST_PARTS - len(self._parts))
        _expand[len(y), triton.cdiv(out_size, _OUTPUTS)](
            inner, self._b, self._scales, slots, y, y.stride(0), out_size, *starts,
            len(self._parts), self._rank, _OUTPUTS,
        )  # fmt: skip
        return y


class SlotMatrix(_Slots):
    """The adapters of one matrix, each in its slot; see `_Slots`."""

    def __init__(
        self, num_slots: int, rank: int, in_size: int, parts: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> None:
        super().__init__(num_slots, rank, parts, like)
        self._a = like.new_zeros(num_slots, len(parts) * self._rank, in_size)

    def add(self, x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts for x [T, in_size] to y [T, out_size] in place and return y.

        Args:
            slots: [T] int32, slot of each row; -1 without an adapter.
        """
        assert x.stride(1) == 1, "rows are in one piece"
        num_tokens, (_, ranks, in_size) = len(x), self._a.shape
        inner = x.new_empty(num_tokens, ranks, dtype=torch.float32)
        shrinking = num_tokens, triton.cdiv(ranks, _RANKS)
        _shrink[shrinking](x, x.stride(0), self._a, slots, inner, ranks, in_size, _RANKS, _WIDTH)
        return self._expand(inner, y, slots)


class SlotEmbedding(_Slots):
    """The adapters of an embedding, each in its slot; its A are held token by token."""

    def __init__(self, num_slots: int, rank: int, sizes: tuple[int, int], like: torch.Tensor) -> None:
        """`sizes`: numbers of tokens, and of an embedding."""
        super().__init__(num_slots, rank, [(0, sizes[1])], like)
        self._a = like.new_zeros(num_slots, sizes[0], self._rank)

    def add(self, token_ids: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts for tokens [T] int64 to their embeddings y [T, hidden_size] in place and return y.

        Args:
            slots: [T] int32, slot of each row; -1 without an adapter.
        """
        slots = self.holding(slots)
        return self._expand(self._a[slots.long(), token_ids].float(), y, slots)

    def _place_of_a(self, slot: int, first: int, rank: int) -> torch.Tensor:
        return self._a[slot, :, first : first + rank].T
