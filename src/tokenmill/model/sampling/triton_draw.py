"""Draws on a GPU: argmax, or a draw with temperature, top-k, top-p and min-p, without a sort of the row.

The meaning is that of `reference`: greedy takes the lowest id of the largest, an unfiltered draw walks the ids in
order, a filtered one walks them by falling logit, then rising id. A row is cut into chunks of fixed size, whose maxima
and sums are made by a program each; the row's program then looks into one chunk only. Filtered rows are narrowed to
short lists in between, see `triton_select`. Sums have a fixed order: a row's token does not depend on other rows. All
launches and sizes follow from the shape of the logits, and memory is left as the next call wants it: a graph may hold
the whole.

What it costs, for S rows of V = 151,936 bfloat16 logits, C = 38 chunks of 4,096. Bytes and programs are counted,
instructions are read off the code; microseconds are estimates for an H200 (4.3 TB/s, 132 multiprocessors of 128 lanes
at 1.7 GHz, 1 us a launch, 1 us for each load that waits for another): nothing has been measured.

| launch | programs | reads, bytes | instructions a logit | us, S = 1 | us, S = 256 |
|---|---|---|---|---|---|
| summarize | S * C | 2 S V | 10, unfiltered 25 | 2 | 20 |
| select, first pass | S * min(C, 528 / S) | 2 S V | 60 | 4 | 80 |
| select, two passes | the same | of chunks in the range, at most 4 S V | 60 for each range | 5 each | 20 to 160 each |
| select, lists | the same | of chunks in the range, at most 4 S V | 25 for each range | 5 | 10 to 60 |
| finish, unfiltered rows | S | 8 KiB of logits | 25, of one chunk | 4 | 5 |
| finish, filtered rows | S | the lists | 1,024 * 8 for each entry of a list | 10 | 20 |

The launch for filtered rows takes 255 registers (compiled for 9.0): a multiprocessor runs one such program at a time.
The one for the others takes 60. Where no row is filtered, it and the four launches of `select` leave at once, 1 us
each: about 11 us in all for one row, 33 us for 256. With filters it is about 30 us for one row. One program a row, as
it was before, had been estimated at 100 to 350 us, and at 4 to 6 ms with filters, for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.sampling.draws import Kind
from tokenmill.model.sampling.triton_search import (
    LARGEST,
    draw_by_search,
    finite,
    load_tile,
    pick,
    read_draw,
    weight_of,
)
from tokenmill.model.sampling.triton_select import CAPACITY, LEVELS, WAYS, cuts_of, draw_from_lists, select, shape_of

# Logits of a chunk, and of what a program holds at once in a pass of `select`.
CHUNK, TILE = 4096, 512
# Programs that a pass is shared among: four for each multiprocessor of a large GPU.
_PROGRAMS = 528
_GREEDY, _UNFILTERED, _FILTERED = (tl.constexpr(int(kind)) for kind in Kind)


@triton.jit(do_not_specialize_on_alignment=["integers", "numbers"])
def _summarize(logits, stride, size, integers, numbers, summaries, counters, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Write summaries [S, 3, CHUNKS] float64 of each chunk: largest logit (a NaN is +inf), least, and, where the row is
    unfiltered, the sum of weights relative to the chunk's largest."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + index * stride + ids, ids < size, float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    largest = tl.max(x, 0)
    summaries += index * 3 * CHUNKS + chunk
    tl.store(summaries, largest.to(tl.float64))
    tl.store(summaries + CHUNKS, finite(tl.min(tl.where(ids < size, x, LARGEST), 0)).to(tl.float64))
    draw = read_draw(integers, numbers, index)
    if draw[0] == _UNFILTERED:
        weights = weight_of(finite(x), finite(largest), draw[2].to(tl.float32))
        tl.store(summaries + 2 * CHUNKS, tl.sum(tl.where(ids < size, weights, 0.0).to(tl.float64), 0))
    if chunk == 0:
        tl.store(counters + index * 2 + tl.arange(0, 2), 0)


@triton.jit
def _draw_from_chunk(row, size, highest, summaries, num_chunks, draw, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Choose a chunk by its summary, and a token of it: the first id at which the cumulative weight exceeds the
    uniform's share of it. Greedy, only the largest logits have a weight, and the share is 0."""
    kind, _, temperature, _, _, uniform = draw
    is_greedy, temperature = kind == _GREEDY, temperature.to(tl.float32)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    maxima = finite(tl.load(summaries + chunks, exists, float("-inf")).to(tl.float32))
    sums = tl.load(summaries + 2 * CHUNKS + chunks, exists & (not is_greedy), 0.0)
    sums = tl.where(is_greedy, exists & (maxima == highest), sums * weight_of(maxima, highest, temperature))
    reached = tl.cumsum(sums.to(tl.float64), 0)
    total = tl.max(reached, 0)
    target = tl.where(is_greedy, 0.0, uniform) * total
    chunk = pick(reached, exists, target, total)
    before = tl.max(tl.where(chunks < chunk, reached, 0.0), 0)
    x, inside = load_tile(row, chunk * CHUNK, size, CHUNK)
    weights = tl.where(is_greedy, x == highest, weight_of(x, highest, temperature))
    reached = before + tl.cumsum(tl.where(inside, weights, 0.0).to(tl.float64), 0)
    return chunk * CHUNK + pick(reached, inside, target, tl.max(reached, 0))


@triton.jit(do_not_specialize_on_alignment=["integers", "numbers"])
def _finish(
    logits, stride, size, integers, numbers, summaries, sums, counters, lists, token_ids,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    """Draw the tokens of the filtered rows, or of all others: the first take all registers there are."""
    index = tl.program_id(0).to(tl.int64)
    draw = read_draw(integers, numbers, index)
    if (draw[0] == _FILTERED) != IS_FILTERED:
        return
    row = logits + index * stride
    summaries += index * 3 * CHUNKS
    num_chunks = tl.cdiv(size, CHUNK)
    shape = shape_of(summaries, num_chunks, draw, CHUNKS)
    highest, counts, token = shape[0], shape[5], 0
    if not IS_FILTERED:
        token = _draw_from_chunk(row, size, highest, summaries, num_chunks, draw, CHUNK, CHUNKS)
    else:
        one, two = tl.load(counters + index * 2), tl.load(counters + index * 2 + 1)
        # A range may be empty where the sums of two passes are rounded otherwise.
        has_one, has_two = (one > 0) | ((draw[3] >= 1.0) & (not counts)), (two > 0) | counts
        if has_one & has_two & (tl.maximum(one, two) <= CAPACITY):
            cuts = cuts_of(sums + index * LEVELS * 2 * CHUNKS * WAYS, num_chunks, draw, shape, CHUNKS, LEVELS)
            token = draw_from_lists(lists + index * 2 * CAPACITY, (one, two), highest, draw, cuts, counts)
        else:
            token = draw_by_search(row, size, highest, draw, CHUNK)
    tl.store(token_ids + index, tl.where(tl.abs(highest) < LARGEST, token, -1).to(tl.int64))


def draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw as `reference.draw`, on a GPU.

    Args:
        logits: [S, V] of any float, the last dimension contiguous.

    Returns:
        [S] int64 token ids.
    """
    assert draws.is_contiguous(), "packed draws are in one piece"
    count, size = logits.shape
    num_chunks = triton.cdiv(size, CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    token_ids = draws.new_empty(count)
    if not count:
        return token_ids
    summaries = draws.new_empty(count, 3, chunks, dtype=torch.float64)
    sums = draws.new_empty(count, LEVELS.value, 2, chunks, WAYS.value, dtype=torch.float64)
    counters, lists = draws.new_empty(count, 2, dtype=torch.int32), draws.new_empty(count, 2, CAPACITY.value)
    rows = (logits, logits.stride(0), size, draws, draws.view(torch.float64), summaries)
    sizes = {"CHUNK": CHUNK, "CHUNKS": chunks}
    _summarize[count, num_chunks](*rows, counters, **sizes, num_warps=4)
    programs = min(num_chunks, max(1, _PROGRAMS // count))
    for level in range(LEVELS.value + 1):
        select[count, programs](*rows, sums, counters, lists, **sizes, TILE=TILE, LEVEL=level, num_warps=8)
    for is_filtered in (False, True):
        _finish[(count,)](*rows, sums, counters, lists, token_ids, **sizes, IS_FILTERED=is_filtered, num_warps=8)
    return token_ids
