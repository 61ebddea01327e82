"""Join the parts of decodes whose contexts were split among programs (flash decoding); see `attention.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.model.kernels.triton.launch import follow

# Programs that join parts wait for memory: with one warp each, all of a step of 256 requests are there at once. On an
# H100 that step of Qwen3-0.6B takes 0.2 ms less of 12.6 than with four.
JOIN_WARPS = 1


@triton.jit(do_not_specialize_on_alignment=["query_starts"])
def join_splits(
    parts,
    stops,
    output,
    query_starts,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
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
    head = tl.program_id(1)
    token = tl.load(query_starts + request) + index
    if token < tl.load(query_starts + request + 1):
        ends = (tl.load(stops + request - 1, request > 0, 0), tl.load(stops + request))
        own = parts + (index * HEADS + head) * PART
        target = output + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
        _join_parts(own, ends, target, sinks + head, TOKENS * HEADS * PART, HEAD_DIM, WIDTH, BLOCK, HAS_SINKS)


@triton.jit
def _join_parts(
    parts,
    ends,
    target,
    sink,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """Join the parts of one token and head, `STRIDE` numbers apart, from and to the items in `ends`."""
    column = tl.arange(0, WIDTH)
    first, stop = ends
    highest = float("-inf")
    total = 0.0
    joined = tl.zeros([WIDTH], tl.float32)
    for block in range(first, stop, BLOCK):
        item = block + tl.arange(0, BLOCK)
        # The last part again, which counts nothing: a mask would put each load next to its use, one behind the other.
        part = parts + tl.minimum(item, stop - 1).to(tl.int64) * STRIDE
        attended = tl.load(part[:, None] + (column if WIDTH == HEAD_DIM else column % HEAD_DIM)[None, :])
        high = tl.where(item < stop, tl.load(part + HEAD_DIM), float("-inf"))
        weight = tl.where(item < stop, tl.load(part + HEAD_DIM + 1), 0.0)
        higher = tl.maximum(highest, tl.max(high, 0))
        # Splits before a window have seen nothing.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(high - base)
        kept = tl.exp2(highest - base)
        joined = joined * kept + tl.sum(attended * factor[:, None], 0)
        total = total * kept + tl.sum(weight * factor, 0)
        highest = higher
    if HAS_SINK:
        total += tl.exp2(tl.load(sink).to(tl.float32) * 1.4426950408889634 - highest)
    tl.store(target + column, (joined / total).to(target.dtype.element_ty), column < HEAD_DIM)
