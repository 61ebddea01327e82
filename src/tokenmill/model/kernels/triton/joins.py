"""Join the parts of decodes whose contexts were split: by the last program to finish a token's head, or behind all.

A program writes its parts, waits at a barrier until all of its threads have, and counts them by an atomic addition that
releases what was written before it and acquires what the others released. The program that counts the last part of a
row therefore sees all of them, and it alone joins the row. It makes the counter zero again, which no other program of
the launch touches any more, and the next launch waits for the end of this one.

Rows are summed part by part, so no layout of the compiled code matters: a row has the same bits whoever joins it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.triton.launch import dependent, follow
from tokenmill.model.kernels.triton.splits import PART_EXTRA, Splits

# Programs that join parts wait for memory: with one warp each, all of a step of 256 requests are there at once. On an
# H100 that step of Qwen3-0.6B takes 0.2 ms less of 12.6 than with four.
JOIN_WARPS = 1


@triton.jit
def join_if_last(
    parts,
    stops,
    counters,
    output,
    sinks,
    token,
    request,
    index,
    head,
    is_row,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    JOINS: tl.constexpr,
):
    """Count a part of each row that this program has written, and join the rows whose last one that was.

    Args:
        stops: where the parts of each request end.
        counters: [requests, TOKENS, HEADS] zeros, which they are again afterwards.
        token, request, index, head: of each row: its token, the request, the token's number there, and the head.
        JOINS: False: do nothing.
    """
    if JOINS:
        first = tl.load(stops + request - 1, is_row & (request > 0), 0)
        num_parts = tl.load(stops + request, is_row, 0) - first
        counter = counters + (request * TOKENS + index) * HEADS + head
        tl.debug_barrier()
        counted = tl.atomic_add(counter, 1, is_row, sem="acq_rel")
        is_last = is_row & (counted + 1 == num_parts)
        if tl.max(is_last.to(tl.int32), 0) > 0:
            tl.store(counter, 0, is_last)
            own = parts + ((first.to(tl.int64) * TOKENS + index) * HEADS + head) * PART
            target = output + (token * HEADS + head) * HEAD_DIM
            stride: tl.constexpr = TOKENS * HEADS * PART
            _join_rows(own, num_parts, is_last, target, sinks + head, stride, HEAD_DIM, ROWS, WIDTH, HAS_SINKS)


@triton.jit
def _join_rows(
    parts,
    num_parts,
    is_row,
    target,
    sinks,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join the parts of rows, a token and head each, `STRIDE` numbers apart, weighted by how high their scores were."""
    column = tl.arange(0, WIDTH)
    numbers = parts[:, None] + column[None, :]
    is_number = (column < HEAD_DIM)[None, :]
    scores = parts + HEAD_DIM
    stop = tl.where(is_row, num_parts, 0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, WIDTH], tl.float32)
    # Of one row more is on its way together.
    AT_ONCE: tl.constexpr = 4 if ROWS == 1 else 2
    for block in range(0, tl.max(stop, 0), AT_ONCE):
        place = block * tl.cast(STRIDE, tl.int64)
        first = _load_part(numbers + place, scores + place, block < stop, is_number)
        place += STRIDE
        second = _load_part(numbers + place, scores + place, block + 1 < stop, is_number)
        if ROWS == 1:
            place += STRIDE
            third = _load_part(numbers + place, scores + place, block + 2 < stop, is_number)
            place += STRIDE
            fourth = _load_part(numbers + place, scores + place, block + 3 < stop, is_number)
        joined, highest, total = _add_part(joined, highest, total, first)
        joined, highest, total = _add_part(joined, highest, total, second)
        if ROWS == 1:
            joined, highest, total = _add_part(joined, highest, total, third)
            joined, highest, total = _add_part(joined, highest, total, fourth)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks).to(tl.float32) * 1.4426950408889634 - highest)
    result = (joined / tl.where(is_row, total, 1.0)[:, None]).to(target.dtype.element_ty)
    tl.store(target[:, None] + column[None, :], result, is_row[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit
def _load_part(numbers, scores, is_there, is_number):
    """Return a part of each row: its sum, highest score and total weight; nothing where it is not there."""
    high = tl.load(scores, is_there, float("-inf"), cache_modifier=".cg")
    weight = tl.load(scores + 1, is_there, 0.0, cache_modifier=".cg")
    return tl.load(numbers, is_there[:, None] & is_number, 0.0, cache_modifier=".cg"), high, weight


@triton.jit
def _add_part(joined, highest, total, part):
    """Add a part of each row to what has been joined."""
    attended, high, weight = part
    higher = tl.maximum(highest, high)
    # Splits before a window have seen nothing.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor = tl.exp2(high - base)
    kept = tl.exp2(highest - base)
    joined = tl.fma(joined, tl.broadcast_to(kept[:, None], joined.shape), attended * factor[:, None])
    return joined, higher, tl.fma(total, kept, weight * factor)


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def _join(
    parts,
    stops,
    output,
    query_starts,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of one token and head per program, weighted by how high their scores were.

    Estimated, not measured: 4 * head_dim bytes a split, just written, so out of the L2 cache; 2 to 3 us.
    """
    follow(PDL)
    request = tl.program_id(0) // TOKENS
    index = tl.program_id(0) % TOKENS
    head = tl.program_id(1) + tl.arange(0, 1)
    token = tl.load(query_starts + request) + index
    if token < tl.load(query_starts + request + 1):
        first = tl.load(stops + request - 1, request > 0, 0)
        own = parts + ((first.to(tl.int64) * TOKENS + index) * HEADS + head) * PART
        target = output + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
        count = tl.load(stops + request) - first + tl.zeros([1], tl.int32)
        _join_rows(own, count, count > 0, target, sinks + head, TOKENS * HEADS * PART, HEAD_DIM, 1, WIDTH, HAS_SINKS)


def join(
    splits: Splits, output: torch.Tensor, query_starts: torch.Tensor, sinks: torch.Tensor | None, tokens: int
) -> None:
    """Join all parts into output [T, num_heads, head_dim] contiguous; see `attend_decodes`."""
    (num_heads, head_dim), has_sinks = output.shape[1:], sinks is not None
    _join[(len(splits.stops) * tokens, num_heads)](
        *(splits.parts, splits.stops, output, query_starts, sinks if has_sinks else output),
        *(num_heads, head_dim, triton.next_power_of_2(head_dim), head_dim + PART_EXTRA, tokens, has_sinks),
        num_warps=JOIN_WARPS,
        **dependent(output),
    )
