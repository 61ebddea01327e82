"""Draws on a GPU: argmax, or a draw with temperature, top-k, top-p and min-p, without a sort.

The meaning is that of `reference`: greedy takes the lowest id of the largest, an unfiltered draw walks the ids in
order, a filtered one walks them by falling logit, then rising id. What the filters keep is always a head of that
second order, so each filter, and the draw, is a search for the logit at which a count or a sum of weights passes a
target: four bits of it a pass, sixteen sums at once (a radix select, as in Merrill's and FlashInfer's samplers). Sums
are taken tile by tile in float64: a row's token does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.sampling.draws import NUM_FIELDS, Draw, Kind

TILE = 1024
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SIGN = tl.constexpr(-0x80000000)
_WAYS = tl.constexpr(16)
# The packed draw.
_NUM_FIELDS = tl.constexpr(NUM_FIELDS)
_GREEDY, _UNFILTERED = tl.constexpr(int(Kind.GREEDY)), tl.constexpr(int(Kind.UNFILTERED))
_KIND, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P, _UNIFORM = (
    tl.constexpr(Draw._fields.index(name)) for name in ("kind", "top_k", "temperature", "top_p", "min_p", "uniform")
)


@triton.jit
def _load(row, start, size, TILE: tl.constexpr):
    """Logits of a tile as `ranking.finite` gives them, and which of them are inside the row."""
    ids = start + tl.arange(0, TILE)
    inside = ids < size
    x = tl.load(row + ids, inside, 0.0).to(tl.float32)
    x = tl.where(x != x, _LARGEST, x)
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST), inside


@triton.jit
def _key(x):
    """uint32 in the order of floats."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ tl.where(bits < 0, -1, _SIGN)).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """The float of a key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ tl.where(bits < 0, _SIGN, -1)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, highest, temperature):
    return tl.exp((x - highest) / temperature)


@triton.jit
def _search(row, size, shape, floor, floor_sum, target, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """The largest key for which the tokens at or above it sum up to more than `target`, and the sum above it.

    Only tokens above `floor` are summed; those at the floor that are kept have a sum of `floor_sum` together.

    Args:
        shape: highest logit, temperature, least weight. COUNTS: tokens count 1 each instead of their weight.
    """
    highest, temperature, least = shape
    prefix = tl.cast(0, tl.uint32)
    above = tl.cast(0.0, tl.float64)
    ways = tl.arange(0, _WAYS)
    for level in range(8):
        shift = tl.cast(28 - 4 * level, tl.uint32)
        thresholds = prefix + (ways.to(tl.uint32) << shift)
        sums = tl.where(thresholds <= floor, floor_sum, 0.0).to(tl.float64)
        for start in range(0, size, TILE):
            x, inside = _load(row, start, size, TILE)
            key = _key(x)
            weight = _weight(x, highest, temperature)
            is_member = inside & (key > floor) & (weight >= least)
            amount = tl.where(is_member, 1.0 if COUNTS else weight, 0.0)
            reached = key[None, :] >= thresholds[:, None]
            sums += tl.sum(tl.where(reached, amount[None, :], 0.0), 1).to(tl.float64)
        digit = tl.maximum(tl.sum((sums > target).to(tl.int32), 0) - 1, 0)
        next_sum = tl.sum(tl.where(ways == digit + 1, sums, 0.0), 0)
        above = tl.where(digit < _WAYS - 1, next_sum, above)
        prefix += digit.to(tl.uint32) << shift
    return prefix, above


@triton.jit
def _total(row, size, shape, floor, TILE: tl.constexpr):
    """Weight of all tokens above the floor."""
    highest, temperature, least = shape
    total = tl.cast(0.0, tl.float64)
    for start in range(0, size, TILE):
        x, inside = _load(row, start, size, TILE)
        weight = _weight(x, highest, temperature)
        is_member = inside & (_key(x) > floor) & (weight >= least)
        total += tl.sum(tl.where(is_member, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _draw_unfiltered(row, size, shape, uniform, TILE: tl.constexpr):
    """The first id at which the cumulative weight exceeds the uniform's share of it; never one of weight 0."""
    highest, temperature, _ = shape
    target = uniform * _total(row, size, shape, tl.cast(0, tl.uint32), TILE)
    passed = tl.cast(0.0, tl.float64)
    before = tl.cast(0.0, tl.float64)
    chosen = 0
    for start in range(0, size, TILE):
        x, inside = _load(row, start, size, TILE)
        weight = tl.sum(tl.where(inside, _weight(x, highest, temperature), 0.0), 0).to(tl.float64)
        # The last tile with any weight that begins at or below the target.
        is_here = (passed <= target) & (weight > 0.0)
        chosen = tl.where(is_here, start, chosen)
        before = tl.where(is_here, passed, before)
        passed += weight
    x, inside = _load(row, chosen, size, TILE)
    weights = tl.where(inside, _weight(x, highest, temperature), 0.0).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    is_passed = (before + cumulative <= target).to(tl.int32)
    has_more = (cumulative < tl.max(cumulative, 0)).to(tl.int32)
    return chosen + tl.minimum(tl.sum(is_passed, 0), tl.sum(has_more, 0))


@triton.jit
def _draw_filtered(row, size, shape, top_k, top_p, uniform, TILE: tl.constexpr):
    """Draw among what the filters keep: all tokens above a floor, and the first `ties` of those that are at it."""
    highest, temperature, least = shape
    floor = tl.cast(0, tl.uint32)
    ties = tl.cast(0.0, tl.float64)
    floor_weight = tl.cast(0.0, tl.float64)
    if top_k < size:
        everything = (highest, temperature, -1.0)
        floor, above = _search(row, size, everything, floor, ties, (top_k - 1).to(tl.float64), True, TILE)
        ties = top_k.to(tl.float64) - above
        weight = _weight(_value(floor), highest, temperature)
        floor_weight = tl.where(weight >= least, weight, 0.0).to(tl.float64)
    total = _total(row, size, shape, floor, TILE) + ties * floor_weight
    if top_p < 1.0:
        # The last token that is kept begins below the nucleus: the sum at it is the first that is not below.
        nucleus = top_p * total
        almost = nucleus * (1.0 - 2.3e-16)
        last, above = _search(row, size, shape, floor, ties * floor_weight, almost, False, TILE)
        weight = _weight(_value(last), highest, temperature).to(tl.float64)
        kept = tl.maximum(tl.ceil((nucleus - above) / weight), 1.0)
        ties = tl.where(last == floor, tl.minimum(ties, kept), kept)
        floor = last
        floor_weight = weight
        total = above + ties * weight
    target = uniform * total
    drawn, above = _search(row, size, shape, floor, ties * floor_weight, target, False, TILE)
    weight = _weight(_value(drawn), highest, temperature).to(tl.float64)
    place = tl.maximum(tl.floor((target - above) / weight), 0.0)
    place = tl.where(drawn == floor, tl.minimum(place, ties - 1.0), place).to(tl.int32)
    return _find(row, size, drawn, place, TILE)


@triton.jit
def _find(row, size, key, place, TILE: tl.constexpr):
    """The id of the token number `place` among those with this key; the last one if there are fewer."""
    seen = 0
    found = 0
    for start in range(0, size, TILE):
        x, inside = _load(row, start, size, TILE)
        is_equal = (inside & (_key(x) == key)).to(tl.int32)
        rank = seen + tl.cumsum(is_equal, 0) - 1
        ids = start + tl.arange(0, TILE)
        found = tl.maximum(found, tl.max(tl.where((is_equal > 0) & (rank <= place), ids, 0), 0))
        seen += tl.sum(is_equal, 0)
    return found


@triton.jit
def _draw(logits, stride, size, integers, numbers, token_ids, TILE: tl.constexpr):
    """Draw for a row. `integers` and `numbers` are the packed draws, as int64 and as float64."""
    index = tl.program_id(0)
    integers += index * _NUM_FIELDS
    numbers += index * _NUM_FIELDS
    row = logits + index.to(tl.int64) * stride
    largest = tl.cast(float("-inf"), tl.float32)
    first = 0
    highest = -_LARGEST
    for start in range(0, size, TILE):
        ids = start + tl.arange(0, TILE)
        raw = tl.load(row + ids, ids < size, float("-inf")).to(tl.float32)
        raw = tl.where(raw != raw, float("inf"), raw)
        top = tl.max(raw, 0)
        place = tl.min(tl.where((raw == top) & (ids < size), ids, size), 0)
        first = tl.where(top > largest, place, first)
        largest = tl.maximum(largest, top)
        x, inside = _load(row, start, size, TILE)
        highest = tl.maximum(highest, tl.max(tl.where(inside, x, -_LARGEST), 0))
    token = first
    kind = tl.load(integers + _KIND)
    if kind != _GREEDY:
        temperature = tl.load(numbers + _TEMPERATURE).to(tl.float32)
        uniform = tl.load(numbers + _UNIFORM)
        if kind == _UNFILTERED:
            token = _draw_unfiltered(row, size, (highest, temperature, 0.0), uniform, TILE)
        else:
            shape = (highest, temperature, tl.load(numbers + _MIN_P).to(tl.float32))
            top_k = tl.load(integers + _TOP_K)
            token = _draw_filtered(row, size, shape, top_k, tl.load(numbers + _TOP_P), uniform, TILE)
    token = tl.where((largest > float("-inf")) & (largest < float("inf")), token, -1)
    tl.store(token_ids + index, tl.cast(token, tl.int64))


def draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """As `reference.draw`, on a GPU: logits [S, V] float32, the last dimension contiguous; -> [S] int64 token ids."""
    assert draws.is_contiguous(), "packed draws are in one piece"
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _draw[(len(logits),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            draws,
            draws.view(torch.float64),
            token_ids,
            TILE=TILE,
            num_warps=8,
        )
    return token_ids
