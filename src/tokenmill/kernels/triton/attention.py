"""Flash attention (Dao et al. 2022) over pages, with an online softmax, for requests with any number of tokens.

A tile is some tokens of one request times the heads that share a key head, so that keys are read once for all of them.
Keys are visited in tiles that begin at multiples of `TILE_KEYS` whatever the chunk, so a token's sums depend on nothing
but its own context. Requests with a single token have a kernel of their own (`decode_attention`) out of the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.search import find_group, first_row

LOG2_E = 1.4426950408889634
TILE_KEYS = 64
# Rows of a tile (tokens * heads of a group) of prompts; of decodes it is the smallest that matrix units take. Exact
# products of float32 run beside those units, in registers: larger tiles spill them, and take long to compile.
PROMPT_ROWS = 128
DECODE_ROWS = 16
# Of a tile of one token whose sums must be those of a tile of many. On capability 9.0 both run the same instructions
# on 64 rows, one group of four warps here and two there, so no row can tell; elsewhere warps would part the columns.
SINGLE_ROWS = 64
# A third stage of keys and values fits beside a tile of queries up to this many bytes of a head.
THREE_STAGES_BYTES = 256


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A layer's memory and what of it each request sees; B requests, tensors on the device.

    Attributes:
        keys, values: [pages, page_size, num_kv_heads, head_dim] contiguous.
        page_table: [B, P] int32.
        context_lens: [B] int32.
        query_starts: [B + 1] int32; the first is the number of the first token, which need not be 0.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor


@triton.jit
def load_pages(pages, key, stop, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Ids of the pages of a tile's keys, asked for a turn before they are needed: keys wait for their page's id."""
    place = key + tl.arange(0, TILE)
    return tl.load(pages + place // PAGE_SIZE, place < stop, 0)


@triton.jit
def attend_tile(
    query,
    keys,
    values,
    page,
    key,
    stop,
    position,
    kv_head,
    scale,
    window,
    highest,
    total,
    attended,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One turn of the online softmax: highest score yet (unscaled), total weight and weighted sum of each row.

    Sums and products are fused by name, so that a row's bits are the same where the mask is compiled and where not.
    """
    place = key + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    source = ((page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    wanted = tl.broadcast_to((column < HEAD_DIM)[None, :], [TILE, WIDTH])
    if IS_MASKED:
        # Slots outside of the request are loaded as zeros: a weight of 0 does not hide a NaN.
        wanted = wanted & (place < stop)[:, None]
    k = tl.load(keys + source[:, None] + column[None, :], wanted, 0.0)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    if IS_MASKED:
        is_visible = (place < stop)[None, :] & (place[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_visible = is_visible & (place[None, :] > position[:, None] - window)
        scores = tl.where(is_visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = higher
    if IS_MASKED:
        # A row that has seen nothing yet has no highest score; a difference of infinities would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, scale, -(base * scale)[:, None]))
    kept = tl.exp2((highest - base) * scale)
    v = tl.load(values + source[:, None] + column[None, :], wanted, 0.0)
    total = tl.fma(total, kept, tl.sum(weights, 1))
    attended = tl.dot(weights.to(v.dtype), v, attended * kept[:, None], input_precision="ieee")
    return higher, total, attended


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens"],
)
def _attend_prompts(
    q,
    keys,
    values,
    output,
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
    TILE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """A program per tile and key head, the tiles that see the most keys first.

    Cost (estimated for an H200 at 790 TFLOP/s and 4.3 TB/s, not measured): a tile of R rows at context c does
    4 * R * c * head_dim FLOP and reads 4 * c * head_dim bytes in half precision, mostly from the L2 cache: R = 128
    FLOP a byte. A prompt of 8,192 tokens with 16 heads of 128: 275 GFLOP a layer, 0.35 ms at full rate, 0.6 to 0.7 ms
    expected, because products wait for the softmax between them (no specialized warps); 128 * 8 programs, the longest
    of 128 turns. A turn outside of the masked tail is two products, one fused multiply-add, one exponential and two
    reductions per score; only the last TILE_TOKENS / TILE + 1 turns compare positions.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tile
    first = 0
    if TILE_TOKENS > 1:
        request = find_group(query_starts, tile, num_requests, TILE_TOKENS)
        first = first_row(query_starts, tile, request, TILE_TOKENS)
    start = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - start
    if first < query_len:
        computed = tl.load(context_lens + request) - query_len
        row = tl.arange(0, ROWS)
        index = first + row // GROUP
        is_row = (row < TILE_TOKENS * GROUP) & (index < query_len)
        column = tl.arange(0, WIDTH)
        token = (start + index).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        loaded = is_row[:, None] & (column < HEAD_DIM)[None, :]
        query = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], loaded, 0.0)
        position = computed + index

        # |begin|<- keys that all rows see ->|clear|<- keys that some see ->|stop|
        stop = computed + tl.minimum(first + TILE_TOKENS, query_len)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(computed + first - window + 1, 0) // TILE * TILE
            clear = begin
        else:
            clear = (computed + first + 1) // TILE * TILE
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, WIDTH], tl.float32)
        pages = page_table + request.to(tl.int64) * table_stride
        page = load_pages(pages, begin, stop, PAGE_SIZE, TILE)
        if not HAS_WINDOW:
            for key in range(0, clear, TILE):
                ahead = load_pages(pages, key + TILE, stop, PAGE_SIZE, TILE)
                highest, total, attended = attend_tile(
                    *(query, keys, values, page, key, stop, position, kv_head, scale, window),
                    *(highest, total, attended, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH, TILE, HAS_WINDOW, False),
                )
                page = ahead
        for key in range(clear, stop, TILE):
            ahead = load_pages(pages, key + TILE, stop, PAGE_SIZE, TILE)
            highest, total, attended = attend_tile(
                *(query, keys, values, page, key, stop, position, kv_head, scale, window),
                *(highest, total, attended, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, WIDTH, TILE, HAS_WINDOW, True),
            )
            page = ahead
        target = output + (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, (attended / total[:, None]).to(output.dtype.element_ty), loaded)


def attend_prompts(
    q: torch.Tensor,
    kv: PagedKV,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    are_single: bool = False,
) -> None:
    """Attention of requests with any number of tokens.

    Args:
        q: [T, num_heads, head_dim], heads contiguous, tokens with any stride; also holds tokens of other requests.
        output: [T, num_heads, head_dim] contiguous; only the tokens of these requests are written.
        window: a token sees itself and at most window - 1 tokens before it; None: all.
        are_single: each request has one token, whose sums are those that it would have in a longer chunk: on a GPU of
            capability 9.0, by the layout of the compiled code (`tests/kernels/test_triton_compiles.py`).
    """
    num_kv_heads = kv.keys.shape[2]
    group, num_requests = q.shape[1] // num_kv_heads, len(kv.context_lens)
    least = DECODE_ROWS if q.is_cuda and q.dtype == torch.float32 else SINGLE_ROWS if are_single else PROMPT_ROWS
    tokens = 1 if are_single else max(2, least // group)
    rows = max(least, triton.next_power_of_2(tokens * group))
    # The tokens from the first of these requests on bound their tiles from above; the host knows no more.
    tiles = num_requests if are_single else q.shape[0] // tokens + num_requests
    _attend_prompts[(tiles, num_kv_heads)](
        q,
        kv.keys,
        kv.values,
        output,
        kv.page_table,
        kv.query_starts,
        kv.context_lens,
        num_requests,
        scale * LOG2_E,
        q.stride(0),
        kv.page_table.stride(0),
        window or 0,
        **shape_of(kv, group),
        TILE_TOKENS=tokens,
        ROWS=rows,
        HAS_WINDOW=window is not None,
        num_warps=8 if rows > 64 else 4,
        num_stages=num_stages(q),
    )


def shape_of(kv: PagedKV, group: int) -> dict[str, int]:
    """The constants that both kernels are compiled for."""
    page_size, num_kv_heads, head_dim = kv.keys.shape[1:]
    return {
        "PAGE_SIZE": page_size,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "TILE": TILE_KEYS,
    }


def num_stages(q: torch.Tensor) -> int:
    """How many tiles of keys and values are on their way at once, as far as shared memory holds them."""
    return 3 if q.shape[2] * q.element_size() <= THREE_STAGES_BYTES else 2
