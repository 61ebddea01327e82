"""The head of a row that filters may keep, found by many programs: a radix select over codes of 12 bits.

A token's code is its distance below the row's largest logit in 4,096 equal steps, so that codes are in the order of
logits. Each of three passes sums, for every chunk of a row, counts or weights below sixteen bounds. They cut the range
in which a target is reached to a sixteenth; the last ranges are copied into lists, of which one program does the rest.
There are two ranges: that in which the filters end, and, where top-k is off, that of the drawn token. What the target
of the second is depends on where exactly top-p ends, but for less than the weight of one token: it has two ends.

Chunks are fixed and their sums are added in a fixed order, in float64. The order in which programs fill a list is not
fixed, but nothing is made of it. So a row's token depends neither on other rows nor on the number of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.model.sampling.draws import Kind
from tokenmill.model.sampling.triton_search import (
    finite,
    id_of,
    key_of,
    load_tile,
    logit_of,
    pick,
    read_draw,
    weight_of,
)

LEVELS = tl.constexpr(3)
WAYS = tl.constexpr(16)
# Entries of a list; a row with longer ones is drawn by `triton_search`.
CAPACITY = tl.constexpr(1024)
_CODES = tl.constexpr(4096)
# Temperatures below the largest logit, within which are all tokens that a sum of weights in float64 feels.
_REACH = tl.constexpr(40.0)
# Weights of lists are integers, a weight of 1 this one: the order of a list does not round their sums.
_UNIT = tl.constexpr(2.0**50)
_FILTERED = tl.constexpr(int(Kind.FILTERED))


@triton.jit
def shape_of(summaries, num_chunks, draw, CHUNKS: tl.constexpr):
    """Return highest logit, temperature, least weight, farthest distance, codes per distance; if top-k counts
    tokens."""
    chunks = tl.arange(0, CHUNKS)
    highest = tl.max(tl.load(summaries + chunks, chunks < num_chunks, float("-inf")), 0)
    lowest = tl.min(tl.load(summaries + CHUNKS + chunks, chunks < num_chunks, float("inf")), 0)
    highest = finite(highest.to(tl.float32))
    _, top_k, temperature, _, min_p, _ = draw
    temperature, counts = temperature.to(tl.float32), top_k <= CAPACITY
    farthest = finite(tl.minimum(highest - lowest.to(tl.float32), temperature * _REACH))
    scale = tl.where(farthest > 1e-30, (1.0 / tl.maximum(farthest, 1e-30)) * _CODES, 0.0)
    # Lists are weighed in float64 again.
    return highest, temperature, min_p.to(tl.float32) * tl.where(counts, 0.99999, 1.0), farthest, scale, counts


@triton.jit
def _code(distance, scale):
    return tl.minimum(distance * scale, _CODES - 1.0).to(tl.int32)


@triton.jit
def _bounds(low, high):
    """Return the ends of sixteen parts of a range of codes."""
    return low + ((high - low) * (tl.arange(0, WAYS) + 1) >> 4)


@triton.jit
def _narrowed(cut, sums, target, latest):
    """Return the parts of a range in which sums pass targets.

    Args:
        cut: first code, the code behind the last, sum before the first. sums: [WAYS], of the parts up to each.
    """
    low, high, before = cut
    ways = tl.arange(0, WAYS)
    bounds, reached = _bounds(low, high), before + sums
    first = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), WAYS - 1)
    last = tl.minimum(tl.sum((reached <= latest).to(tl.int32), 0), WAYS - 1)
    start = tl.max(tl.where(ways < first, bounds, low), 0)
    end = tl.max(tl.where(ways <= last, bounds, low), 0)
    return start, end, tl.max(tl.where(ways < first, reached, before), 0)


@triton.jit
def _summed(sums, num_chunks, CHUNKS: tl.constexpr):
    """Return [WAYS] sums over the chunks of [CHUNKS, WAYS]."""
    chunks, ways = tl.arange(0, CHUNKS), tl.arange(0, WAYS)
    places = chunks[:, None] * WAYS + ways[None, :]
    return tl.sum(tl.load(sums + places, chunks[:, None] < num_chunks, 0.0), 0)


@triton.jit
def cuts_of(sums, num_chunks, draw, shape, CHUNKS: tl.constexpr, LEVEL: tl.constexpr):
    """Return the two ranges after the passes before LEVEL, as of `_narrowed`, and the sum of all tokens."""
    _, top_k, _, top_p, _, uniform = draw
    _, temperature, _, _, scale, counts = shape
    one = (0, _CODES, tl.cast(0.0, tl.float64))
    two = one
    total = tl.cast(0.0, tl.float64)
    for level in tl.static_range(LEVEL):
        in_one = _summed(sums + level * 2 * CHUNKS * WAYS, num_chunks, CHUNKS)
        in_two = in_one if level == 0 else _summed(sums + (level * 2 + 1) * CHUNKS * WAYS, num_chunks, CHUNKS)
        total = tl.max(in_one, 0) if level == 0 else total
        # The last token that top-p keeps begins below the nucleus: the sum at it is the first that is not below.
        end = tl.where(counts, top_k - 1.0, top_p * total * (1.0 - 2.3e-16))
        one = _narrowed(one, in_one, end, end)
        spare = tl.exp(-one[0] / tl.maximum(scale, 1e-30) / temperature) * 1.001
        two = _narrowed(two, in_two, uniform * top_p * total, uniform * tl.minimum(top_p * total + spare, total))
        # A range that no row asks for is empty.
        one = (one[0], tl.where(counts | (top_p < 1.0), one[1], one[0]), one[2])
        two = (two[0], tl.where(counts, two[0], two[1]), two[2])
    return one, two, total


@triton.jit(do_not_specialize_on_alignment=["integers", "numbers"])
def select(
    logits, stride, size, integers, numbers, summaries, sums, counters, lists,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, LEVEL: tl.constexpr,
):  # fmt: skip
    """Run a pass over the filtered rows: sums of chunks, or, after all LEVELS, the lists.

    Args:
        summaries: see `triton_draw`.
        sums: [S, LEVELS, 2, CHUNKS, WAYS] float64.
        counters: [S, 2] int32, zeros; becomes the lengths of the lists.
        lists: [S, 2, CAPACITY] int64, keys.
    """
    index = tl.program_id(0).to(tl.int64)
    draw = read_draw(integers, numbers, index)
    if (draw[0] != _FILTERED) | ((draw[1] > CAPACITY) & (draw[1] < size)):
        return
    summaries += index * 3 * CHUNKS
    sums += index * LEVELS * 2 * CHUNKS * WAYS
    num_chunks = tl.cdiv(size, CHUNK)
    shape = shape_of(summaries, num_chunks, draw, CHUNKS)
    highest, temperature, least, farthest, scale, counts = shape
    one, two, _ = cuts_of(sums, num_chunks, draw, shape, CHUNKS, LEVEL)
    # In the first pass both ranges are the whole.
    for item in range(tl.program_id(1), num_chunks * (1 if LEVEL == 0 else 2), tl.num_programs(1)):
        which, chunk = item // num_chunks, item % num_chunks
        low, high = tl.where(which == 0, one[0], two[0]), tl.where(which == 0, one[1], two[1])
        low = tl.where(counts & (which == 0) & (LEVEL == LEVELS), 0, low)
        amounts = tl.zeros((WAYS, TILE), tl.float32)
        nearest = highest - finite(tl.load(summaries + chunk).to(tl.float32))
        if (low < high) & (nearest <= farthest) & (_code(nearest, scale) < high):
            for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, size), TILE):
                x, inside = load_tile(logits + index * stride, start, size, TILE)
                weight, code = weight_of(x, highest, temperature), _code(highest - x, scale)
                is_member = inside & (highest - x <= farthest) & (weight >= least) & (code >= low)
                if LEVEL < LEVELS:
                    amount = tl.where(is_member, tl.where(counts, 1.0, weight), 0.0)
                    amounts += tl.where(code[None, :] < _bounds(low, high)[:, None], amount[None, :], 0.0)
                else:
                    keys = key_of(x, start + tl.arange(0, TILE))
                    _append(counters, lists, index * 2 + which, keys, is_member & (code < high))
        if LEVEL < LEVELS:
            at = sums + ((LEVEL * 2 + which) * CHUNKS + chunk) * WAYS + tl.arange(0, WAYS)
            tl.store(at, tl.sum(amounts.to(tl.float64), 1))


@triton.jit
def _append(counters, lists, place, keys, is_listed):
    """Append those of a tile's keys to the list from a place on; the list holds no more than CAPACITY."""
    number = tl.sum(is_listed.to(tl.int32), 0)
    if number > 0:
        entries = tl.atomic_add(counters + place, number) + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(lists + place * CAPACITY + entries, keys, is_listed & (entries < CAPACITY))


@triton.jit
def _entries(entries, places, number, highest, draw):
    """Return keys of a list at places, and their weights in units."""
    keys = tl.load(entries + places, places < number, 0)
    weights = tl.exp((logit_of(keys).to(tl.float64) - highest) / draw[2])
    return keys, tl.where((places < number) & (weights >= draw[4]), weights * _UNIT, 0.0).to(tl.int64)


@triton.jit
def _ranked(entries, number, highest, draw):
    """Return keys of a list, how many are larger than each, and the weights of all at least as large; in its order.

    Every key is compared with every other: for some dozen entries, as there are, that is less work than a sort.
    """
    keys, _ = _entries(entries, tl.arange(0, CAPACITY), number, highest, draw)
    ranks, reached = tl.zeros((CAPACITY,), tl.int32), tl.zeros((CAPACITY,), tl.int64)
    for start in range(0, number, WAYS):
        places = start + tl.arange(0, WAYS)
        others, weights = _entries(entries, places, number, highest, draw)
        is_before = (others[None, :] >= keys[:, None]) & (places < number)[None, :]
        ranks += tl.sum(is_before.to(tl.int32), 1)
        reached += tl.sum(tl.where(is_before, weights[None, :], 0), 1)
    return keys, ranks - 1, reached.to(tl.float64) / _UNIT


@triton.jit
def draw_from_lists(lists, lengths, highest, draw, cuts, counts):
    """Draw the token of a row whose lists are whole, as `reference` does.

    Args:
        lengths: of the two lists. cuts: as of `cuts_of`. counts: whether the first list has all that top-k keeps.
    """
    one, two, total = cuts
    _, top_k, _, top_p, _, uniform = draw
    number, before = lengths[0], tl.where(counts, 0.0, one[2])
    keys, ranks, reached = _ranked(lists, number, highest, draw)
    reached += before
    is_kept = (tl.arange(0, CAPACITY) < number) & (ranks < top_k)
    total = tl.where(counts, tl.max(tl.where(is_kept, reached, 0.0), 0), total)
    if top_p < 1.0:
        kept = 1 + tl.sum((is_kept & (reached < top_p * total)).to(tl.int32), 0)
        total = tl.max(tl.where(is_kept & (ranks < kept), reached, before), 0)
    if not counts:
        number = lengths[1]
        keys, ranks, reached = _ranked(lists + CAPACITY, number, highest, draw)
        reached += two[2]
    is_there = tl.arange(0, CAPACITY) < number
    place = tl.minimum(pick(reached, is_there, uniform * total, total), number - 1)
    return id_of(tl.sum(tl.where(is_there & (ranks == place), keys, 0), 0))
