"""Attention of requests with one token each: contexts are split among programs, whose parts are joined afterwards.

|256|256| ... 16 of them |512|512| ... 16 of them |1024| ...      keys of split 0, 1, ... of every request

Where splits begin depends on nothing but the position: neither on the batch nor on the length. So a token's sums have
one order in every company, and a context of any length has few enough splits to keep their parts in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.attention import (
    DECODE_ROWS,
    LOG2_E,
    PagedKV,
    attend_tile,
    load_pages,
    num_stages,
    shape_of,
)

SPLIT_KEYS = 256
# After so many splits they are twice as long. With 16 levels, more than int32 can count, they fit into `MOST_SPLITS`.
LEVEL_SPLITS = 16
MOST_SPLITS = 256
# Programs on a multiprocessor hide each other's waits; at 70 KiB each, three fit into the shared memory of an H200's.
PROGRAMS_PER_UNIT = 3


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of a step's requests, request by request, and room for what each of them finds; on the device.

    Attributes:
        items: [n] int32, request * MOST_SPLITS + number of the split; those behind the last split mean nothing.
        starts: [B + 1] int32, the first item of each request.
        sums: [n, num_heads, head_dim] float32, weighted sums of values.
        statistics: [n, num_heads, 2] float32, the highest score and the total weight.
    """

    items: torch.Tensor
    starts: torch.Tensor
    sums: torch.Tensor
    statistics: torch.Tensor


def count_splits(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Splits of contexts of these lengths, each >= 1; `_count_splits` is the same on the device."""
    level = np.frexp((lengths - 1) // (LEVEL_SPLITS * SPLIT_KEYS) + 1)[1].astype(np.int64) - 1
    behind = lengths - LEVEL_SPLITS * SPLIT_KEYS * ((1 << level) - 1)
    return level * LEVEL_SPLITS - (-behind // (SPLIT_KEYS << level))


def list_splits(
    context_lens: torch.Tensor, longest: npt.NDArray[np.integer], num_heads: int, head_dim: int
) -> Splits | None:
    """List the splits of a step on the device, where lengths may change with each replay of a graph.

    Args:
        context_lens: [B] int32 on the device.
        longest: [B] on the host, the most that they may be.

    Returns:
        None: no context is longer than one split.
    """
    if longest.max() <= SPLIT_KEYS:
        return None
    most, num_requests = int(count_splits(longest).sum()), len(context_lens)
    items, starts = (
        torch.empty(size, dtype=torch.int32, device=context_lens.device) for size in (most, num_requests + 1)
    )
    sums, statistics = (
        torch.empty(most, num_heads, size, dtype=torch.float32, device=context_lens.device) for size in (head_dim, 2)
    )
    _list_splits[(num_requests,)](context_lens, items, starts, SPLIT_KEYS, LEVEL_SPLITS, MOST_SPLITS)
    return Splits(items, starts, sums, statistics)


@triton.jit
def _count_splits(length, SPLIT: tl.constexpr, LEVEL: tl.constexpr):
    """See `count_splits`; the level is the exponent of a float that holds a small integer exactly."""
    level = (((length - 1) // (LEVEL * SPLIT) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    behind = length - LEVEL * SPLIT * ((1 << level) - 1)
    return level * LEVEL + tl.cdiv(behind, SPLIT * (1 << level))


@triton.jit(do_not_specialize_on_alignment=["context_lens"])
def _list_splits(context_lens, items, starts, SPLIT: tl.constexpr, LEVEL: tl.constexpr, MOST: tl.constexpr):
    """A program per request writes its own items behind those of the requests before it.

    Cost (estimated, not measured): reads all lengths up to its own, at most 2 KB at 512 requests; some 3 us a step.
    """
    request = tl.program_id(0)
    number = tl.arange(0, MOST)
    before = tl.zeros([MOST], tl.int32)
    for block in range(0, request, MOST):
        is_before = block + number < request
        lengths = tl.load(context_lens + block + number, is_before, 1)
        before += tl.where(is_before, _count_splits(lengths, SPLIT, LEVEL), 0)
    first = tl.sum(before, 0)
    count = _count_splits(tl.load(context_lens + request), SPLIT, LEVEL)
    tl.store(items + first + number, request * MOST + number, number < count)
    tl.store(starts + request, first)
    if request == tl.num_programs(0) - 1:
        tl.store(starts + request + 1, first + count)


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens"],
)
def _attend_decodes(
    q,
    keys,
    values,
    output,
    items,
    starts,
    sums,
    statistics,
    page_table,
    query_starts,
    context_lens,
    num_requests,
    scale,
    q_stride,
    table_stride,
    window,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LEVEL: tl.constexpr,
    MOST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Programs, as many as the device runs at once, take (split, key head) in turn, key heads of a split side by side.

    A grid over the splits of the longest context would be mostly empty, and a program that leaves at once still costs
    the device a start: with 256 rows and 40,960 tokens 110,000 of them a layer, 0.1 to 0.3 ms; here there are none.

    Cost (estimated for an H200 at 4.3 TB/s, not measured): reads 4 * context * head_dim bytes per key head in half
    precision, once. 256 requests at 1,024 tokens, 8 key heads of 128: 1.07 GB a layer, 0.25 ms at full rate; 8,192
    pieces of 128 KiB for 396 programs. The begin of a piece is three loads after each other (item, page id, keys), some
    2 us of its 12, while the other two programs of the multiprocessor have one to two tiles of 32 KiB each on their way
    (compiled for 9.0: copies of 16 bytes, two groups left open at each wait); 33 KiB for each multiprocessor at all
    times would be the whole rate. 80 to 90% of it expected. Parts: GROUP * (head_dim + 2) * 8 bytes written and read
    per piece, 2% of the keys and values at a group of 2, and a launch of `_join`, some 3 us.
    """
    num_items = num_requests
    if IS_SPLIT:
        num_items = tl.load(starts + num_requests)
    for work in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        request = item
        split = 0
        if IS_SPLIT:
            packed = tl.load(items + item)
            request = packed // MOST
            split = packed % MOST
        stop = tl.load(context_lens + request)
        position = stop - 1
        begin = 0
        if IS_SPLIT:
            level = split // LEVEL
            length = SPLIT * (1 << level)
            begin = LEVEL * (length - SPLIT) + split % LEVEL * length
            stop = tl.minimum(begin + length, stop)
        if HAS_WINDOW:
            begin = tl.maximum(begin, tl.maximum(position - window + 1, 0) // TILE * TILE)
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        token = tl.load(query_starts + request).to(tl.int64)
        head = kv_head * GROUP + row
        loaded = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        query = tl.load(q + token * q_stride + head[:, None] * HEAD_DIM + column[None, :], loaded, 0.0)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, WIDTH], tl.float32)
        pages = page_table + request.to(tl.int64) * table_stride
        page = load_pages(pages, begin, stop, PAGE_SIZE, TILE)
        positions = position + tl.zeros([ROWS], tl.int32)
        for key in range(begin, stop, TILE):
            ahead = load_pages(pages, key + TILE, stop, PAGE_SIZE, TILE)
            highest, total, attended = attend_tile(
                *(query, keys, values, page, key, stop, positions, kv_head, scale, window),
                *(highest, total, attended, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH, TILE, HAS_WINDOW, True),
            )
            page = ahead
        if IS_SPLIT:
            part = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
            tl.store(sums + part[:, None] * HEAD_DIM + column[None, :], attended, loaded)
            tl.store(statistics + part * 2, highest * scale, row < GROUP)
            tl.store(statistics + part * 2 + 1, total, row < GROUP)
        else:
            target = output + (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
            tl.store(target, (attended / total[:, None]).to(output.dtype.element_ty), loaded)


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def _join(
    sums,
    statistics,
    starts,
    output,
    query_starts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request and head: its splits, weighted by how high their scores were.

    Cost (estimated, not measured): 4 * (head_dim + 2) bytes a split, just written, so out of the L2 cache; 2 to 3 us.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(starts + request)
    stop = tl.load(starts + request + 1)
    column = tl.arange(0, WIDTH)
    highest = float("-inf")
    total = 0.0
    joined = tl.zeros([WIDTH], tl.float32)
    for block in range(first, stop, BLOCK):
        item = block + tl.arange(0, BLOCK)
        part = item.to(tl.int64) * HEADS + head
        high = tl.load(statistics + part * 2, item < stop, float("-inf"))
        weight = tl.load(statistics + part * 2 + 1, item < stop, 0.0)
        higher = tl.maximum(highest, tl.max(high, 0))
        # Splits before a window have seen nothing, as in `attend_tile`.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(high - base)
        kept = tl.exp2(highest - base)
        wanted = (weight > 0)[:, None] & (column < HEAD_DIM)[None, :]
        found = tl.load(sums + part[:, None] * HEAD_DIM + column[None, :], wanted, 0.0)
        joined = joined * kept + tl.sum(found * factor[:, None], 0)
        total = total * kept + tl.sum(weight * factor, 0)
        highest = higher
    token = tl.load(query_starts + request).to(tl.int64)
    target = output + (token * HEADS + head) * HEAD_DIM + column
    tl.store(target, (joined / total).to(output.dtype.element_ty), column < HEAD_DIM)


def attend_decodes(
    q: torch.Tensor,
    kv: PagedKV,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    splits: Splits | None,
    num_units: int,
) -> None:
    """Attention of requests with one token each.

    Args:
        q, output, window: see `attend_prompts`.
        splits: of these requests, see `list_splits`; layers may share them, one after the other.
        num_units: multiprocessors of the device.
    """
    num_requests, num_heads, head_dim = len(kv.context_lens), q.shape[1], q.shape[2]
    num_kv_heads = kv.keys.shape[2]
    group, shape = num_heads // num_kv_heads, shape_of(kv, num_heads // num_kv_heads)
    most = num_requests if splits is None else len(splits.items)
    room = (output,) * 4 if splits is None else (splits.items, splits.starts, splits.sums, splits.statistics)
    _attend_decodes[(min(most * num_kv_heads, PROGRAMS_PER_UNIT * num_units),)](
        q,
        kv.keys,
        kv.values,
        output,
        *room,
        kv.page_table,
        kv.query_starts,
        kv.context_lens,
        num_requests,
        scale * LOG2_E,
        q.stride(0),
        kv.page_table.stride(0),
        window or 0,
        **shape,
        ROWS=max(DECODE_ROWS, triton.next_power_of_2(group)),
        SPLIT=SPLIT_KEYS,
        LEVEL=LEVEL_SPLITS,
        MOST=MOST_SPLITS,
        HAS_WINDOW=window is not None,
        IS_SPLIT=splits is not None,
        num_warps=4,
        num_stages=num_stages(q),
    )
    if splits is not None:
        _join[(num_requests, num_heads)](
            *(splits.sums, splits.statistics, splits.starts, output, kv.query_starts, num_heads, head_dim),
            WIDTH=shape["WIDTH"],
            BLOCK=LEVEL_SPLITS,
        )
