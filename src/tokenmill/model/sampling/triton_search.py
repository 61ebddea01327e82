"""A filtered draw by one program over a whole row: exact for any row, and slow.

What the filters keep is a head of the order by falling logit, then rising id. A token's key tells its place in that
order, so each filter, and the draw, is a search for the key at which a count or a sum of weights passes a target: a bit
a pass. Sums are taken chunk by chunk in float64. An H200 needs about 5 ms for 152k logits (an estimate): `triton_draw`
comes here only for what does not fit into the lists of `triton_select`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.model.sampling.draws import Draw

LARGEST = tl.constexpr(3.4028234663852886e38)
_SIGN = tl.constexpr(-0x80000000)
_ID_BITS = tl.constexpr(31)
_IDS = tl.constexpr(0x7FFFFFFF)
_NUM_FIELDS = tl.constexpr(len(Draw._fields))
_KIND, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P, _UNIFORM = (
    tl.constexpr(Draw._fields.index(name)) for name in ("kind", "top_k", "temperature", "top_p", "min_p", "uniform")
)


@triton.jit
def read_draw(integers, numbers, index):
    """Return kind, top_k, temperature, top_p, min_p and uniform of a packed draw, given as int64 and as float64."""
    integers, numbers = integers + index * _NUM_FIELDS, numbers + index * _NUM_FIELDS
    kind, top_k = tl.load(integers + _KIND), tl.load(integers + _TOP_K)
    temperature, top_p = tl.load(numbers + _TEMPERATURE), tl.load(numbers + _TOP_P)
    return kind, top_k, temperature, top_p, tl.load(numbers + _MIN_P), tl.load(numbers + _UNIFORM)


@triton.jit
def finite(x):
    """Return logits as `ranking.finite` does, where there is no NaN."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def load_tile(row, start, size, TILE: tl.constexpr):
    """Load logits of a tile as `ranking.finite` gives them, float32, and a mask of those inside the row."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(row + ids, ids < size, 0.0).to(tl.float32)
    return finite(tl.where(x != x, LARGEST, x)), ids < size


@triton.jit
def key_of(x, ids):
    """Return an int64 that is larger for a larger logit, and for a lower id among equal ones; at least 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = (bits ^ tl.where(bits < 0, -1, _SIGN)).to(tl.uint32, bitcast=True)
    return (order.to(tl.int64) << _ID_BITS) | (ids ^ _IDS)


@triton.jit
def logit_of(key):
    """Return the logit of a key."""
    bits = (key >> _ID_BITS).to(tl.uint32).to(tl.int32, bitcast=True)
    return (bits ^ tl.where(bits < 0, _SIGN, -1)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """Return the id of a key, int32."""
    return ((key & _IDS) ^ _IDS).to(tl.int32)


@triton.jit
def weight_of(x, highest, temperature):
    """Return the weight of a logit relative to the highest one."""
    return tl.exp((x - highest) / temperature)


@triton.jit
def pick(reached, exists, target, total):
    """Count the sums that do not exceed the target, at most as many as are below the total."""
    passed = tl.sum((exists & (reached <= target)).to(tl.int32), 0)
    return tl.minimum(passed, tl.sum((exists & (reached < total)).to(tl.int32), 0))


@triton.jit
def _sum_from(row, size, shape, first, counts, CHUNK: tl.constexpr):
    """Sum up the tokens with a key of at least `first`, and with the least weight: their number, or their weight."""
    highest, temperature, least = shape
    total = tl.cast(0.0, tl.float64)
    for start in range(0, size, CHUNK):
        x, inside = load_tile(row, start, size, CHUNK)
        weight = weight_of(x, highest, temperature)
        is_member = inside & (weight >= least) & (key_of(x, start + tl.arange(0, CHUNK)) >= first)
        total += tl.sum(tl.where(is_member, tl.where(counts, 1.0, weight), 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _search(row, size, shape, end, target, counts, CHUNK: tl.constexpr):
    """Find the largest key from which on tokens sum up to more than `target`; those below `end` do not count."""
    found = tl.cast(0, tl.int64)
    for bit in range(63):
        key = found | (tl.cast(1, tl.int64) << (62 - bit))
        is_passed = _sum_from(row, size, shape, tl.maximum(key, end), counts, CHUNK) > target
        found = tl.where(is_passed, key, found)
    return found


@triton.jit
def draw_by_search(row, size, highest, draw, CHUNK: tl.constexpr):
    """Draw the token of a filtered row."""
    _, top_k, temperature, top_p, min_p, uniform = draw
    shape = (highest, temperature.to(tl.float32), min_p.to(tl.float32))
    end = tl.cast(0, tl.int64)
    if top_k < size:
        end = _search(row, size, shape, end, top_k - 1, True, CHUNK)
    if top_p < 1.0:
        # The last token that is kept begins below the nucleus: the sum at it is the first that is not below.
        nucleus = top_p * _sum_from(row, size, shape, end, False, CHUNK)
        end = tl.maximum(end, _search(row, size, shape, end, nucleus * (1.0 - 2.3e-16), False, CHUNK))
    target = tl.minimum(uniform, 1.0 - 2.3e-16) * _sum_from(row, size, shape, end, False, CHUNK)
    return id_of(tl.maximum(end, _search(row, size, shape, end, target, False, CHUNK)))
