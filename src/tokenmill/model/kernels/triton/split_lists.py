"""List the splits of a step's decodes in one launch, and find those that several requests share in one more.

A program for each request reads the first pages of all, and compares two rows of the page table where these are the
same; one program makes the lists. torch took five launches for a list and some 25 with what is shared: on an H100
(27 November 2026) a step of 8 and of 64 requests took 0.06 and 0.05 ms more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.model.kernels.triton.launch import follow

_CHUNK = tl.constexpr(1024)


@triton.jit
def _whole_splits(keys, SPLIT: tl.constexpr, LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """Return the number of splits that end with `keys` keys, or before."""
    count = keys * 0
    for level in tl.static_range(LEVELS):
        inside = tl.maximum(keys - LEVEL * SPLIT * ((1 << level) - 1), 0)
        count += tl.minimum(inside // (SPLIT << level), LEVEL)
    return count


@triton.jit
def _same_pages(first, second, num_pages):
    """Return the number of pages that two rows of the page table begin with alike, of `num_pages`."""
    same = num_pages
    start = 0
    while start < same:
        column = start + tl.arange(0, _CHUNK)
        inside = column < num_pages
        differs = tl.load(first + column, inside, 0) != tl.load(second + column, inside, 0)
        same = tl.minimum(same, tl.min(tl.where(differs, column, num_pages), 0))
        start += _CHUNK
    return same


@triton.jit
def _list(stops, records, counts, request, first, third, lens, place, is_place):
    """Write where the items of the request at each place end, and for each item its record."""
    ends = tl.cumsum(counts, 0)
    tl.store(stops + place, ends, is_place)
    for number in range(tl.max(counts, 0)):
        record = records + (ends - counts + number) * 4
        is_item = number < counts
        tl.store(record, request, is_item)
        tl.store(record + 1, first + number, is_item)
        tl.store(record + 2, third, is_item)
        tl.store(record + 3, lens, is_item)


@triton.jit(
    do_not_specialize=["num_requests", "table_stride"], do_not_specialize_on_alignment=["page_table", "context_lens"]
)
def find_neighbours(
    context_lens,
    page_table,
    order,
    shared,
    num_requests,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPLIT: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the place of one request per program among those with its first page, and the splits in common there."""
    follow(PDL)
    request = tl.arange(0, WIDTH)
    is_request = request < num_requests
    own = tl.program_id(0)
    pages = tl.load(page_table + request.to(tl.int64) * table_stride, is_request, 0).to(tl.int64)
    key = tl.where(is_request, pages * WIDTH + request, -1)
    row = page_table + own.to(tl.int64) * table_stride
    page = tl.load(row).to(tl.int64)
    is_before = is_request & (key < page * WIDTH + own)
    rank = tl.sum(is_before.to(tl.int32), 0)
    before = tl.max(tl.where(is_before, key, -1), 0)
    in_common = 0
    if (before >= 0) & (before // WIDTH == page) & (rank % TOGETHER > 0):
        other = before % WIDTH
        # Whole splits only, and not those that the last tokens are in: these have keys that not all rows see.
        length = tl.minimum(tl.load(context_lens + own), tl.load(context_lens + other))
        same = _same_pages(row, page_table + other * table_stride, tl.cdiv(length, PAGE_SIZE))
        in_common = _whole_splits(tl.minimum(same * PAGE_SIZE, length - 1), SPLIT, LEVEL, LEVELS)
    tl.store(order + rank, own)
    tl.store(shared + rank, in_common)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["context_lens", "query_starts"])
def list_items(
    context_lens,
    query_starts,
    stops,
    records,
    members,
    part_stops,
    part_records,
    order,
    shared,
    num_requests,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the splits of all requests, and those of what they share, in one program."""
    follow(PDL)
    place = tl.arange(0, WIDTH)
    is_place = place < num_requests
    lens = tl.load(context_lens + place, is_place, 1)
    counts = tl.where(is_place, _whole_splits(lens - 1, SPLIT, LEVEL, LEVELS) + 1, 0)
    token = tl.load(query_starts + place, is_place, 0)
    _list(part_stops, part_records, counts, place, place * 0, token, lens, place, is_place)
    if SHARES:
        tl.debug_barrier()  # other threads have written where parts end
        request = tl.load(order + place, is_place, 0)
        in_common = tl.load(shared + place, is_place, 0)
        lens = tl.load(context_lens + request, is_place, 1)
        counts = _whole_splits(lens - 1, SPLIT, LEVEL, LEVELS) + 1 - in_common
        _list(stops, records, tl.where(is_place, counts, 0), request, in_common, place, lens, place, is_place)
        member = members + place * 4
        tl.store(member, tl.load(query_starts + request, is_place, 0), is_place)
        tl.store(member + 1, tl.load(part_stops + request - 1, is_place & (request > 0), 0), is_place)
        tl.store(member + 2, in_common, is_place)
