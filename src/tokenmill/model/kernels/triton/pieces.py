"""Pieces of the work of `attention.py`, a split or a tile for one key head each: which they are, and where they begin.

Decodes begin pieces all the time, so these are arranged for few loads that wait for each other. All that a piece must
know to ask for its page ids and queries stands in a record, which is read while the pieces in front stream:

    piece        | page ids, queries | keys and values ...
    meanwhile    record of the piece after the next one; rows that share the next one's pages

Estimate, not measured: a load that waits for another takes 0.3 us out of the L2 cache, of the 12 us of a piece. A piece
waits once before it asks for its first keys (`tests/model/kernels/machine_code.py` counts). It was 24 times before,
some of them hidden by the other two programs of a multiprocessor, none where a step has few requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.model.kernels.triton.search import find_group, first_row


@triton.jit
def item_of(work, num_work, NUM_KV_HEADS: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Return the split or tile of a piece: all heads of one after the other, or all of a head."""
    return work // NUM_KV_HEADS if HEADS_FIRST else work % (num_work // NUM_KV_HEADS)


@triton.jit
def read_record(records, item, is_item):
    """Return the four numbers of a split's record; see `Splits` and `Shares`."""
    record = records + item * 4
    request, split = tl.load(record, is_item, 0), tl.load(record + 1, is_item, 0)
    return request, split, tl.load(record + 2, is_item, 0), tl.load(record + 3, is_item, 0)


@triton.jit
def first_record(records, item, has_work):
    """Return the record that a program begins with; without work its third number, which nobody has written, is 0."""
    record = records + item * 4
    return tl.load(record), tl.load(record + 1), tl.load(record + 2, has_work, 0), tl.load(record + 3)


@triton.jit
def read_sharers(members, rank, num_requests, GROUP: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr):
    """Return for each row of a tile the splits that its request shares with the one before, its token and first part.

    The rows are of the request at `rank` in the order of `Shares`, and of those behind it.
    """
    number = tl.arange(0, ROWS) // GROUP
    token, part, in_common = number, number, number
    if SHARES:
        member = members + (rank + number) * 4
        is_request = rank + number < num_requests
        token, part = tl.load(member, is_request, 0), tl.load(member + 1, is_request, 0)
        in_common = tl.load(member + 2, is_request & (number > 0), 0)
    return in_common, token, part


@triton.jit
def do_share(in_common, split, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return which rows share a split: those of the first request, and of others up to the first that does not."""
    number = tl.arange(0, ROWS) // GROUP
    return number < tl.min(tl.where((number > 0) & (in_common <= split), number, ROWS), 0)


@triton.jit
def query_len_of(query_starts, request, TILE_TOKENS: tl.constexpr):
    """Return how many tokens a request of decodes has; with one at most, without asking."""
    count = 1
    if TILE_TOKENS > 1:
        count = tl.load(query_starts + request + 1) - tl.load(query_starts + request)
    return count


@triton.jit
def find_tile(query_starts, tile, num_requests, TILE_TOKENS: tl.constexpr):
    """Return the request of a tile of prompts, and the tile's first token in it."""
    request, first = tile, 0
    if TILE_TOKENS > 1:
        request = find_group(query_starts, tile, num_requests, TILE_TOKENS)
        first = first_row(query_starts, tile, request, TILE_TOKENS)
    return request, first


@triton.jit
def bounds_of(split, lowest, stop, SPLIT: tl.constexpr, LEVEL: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Return the first key of a piece and the one behind its last, of keys from `lowest` to `stop`."""
    begin = lowest
    if IS_SPLIT:
        size = SPLIT * (1 << split // LEVEL)
        first = LEVEL * (size - SPLIT) + split % LEVEL * size
        begin = tl.maximum(first, lowest)
        stop = tl.minimum(first + size, stop)
    return begin, stop


@triton.jit
def page_ids(pages, place, stop, PAGE_SIZE: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Return the page ids of keys at some places before `stop`; any ids of the request's for those behind it.

    A mask would cost decodes more than it saves: the compiler puts each masked load next to its use, where it waits for
    the one in front. Pages, not places, are held back, so that keys of one page load it once.
    """
    if IS_SPLIT:
        ids = tl.load(pages + tl.minimum(place // PAGE_SIZE, tl.maximum(stop - 1, 0) // PAGE_SIZE))
    else:
        ids = tl.load(pages + place // PAGE_SIZE, place < stop, 0)
    return ids
