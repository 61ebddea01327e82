"""Attention over pages: flash attention (Dao et al. 2022) with an online softmax, in two launches of one kernel.

A tile is some tokens of one request times the heads that share a key head, so that keys are read once for all of them.
Tokens of prompts take tiles of many tokens; requests with a single token (decodes) take tiles of one, and may split
their context among programs, whose parts a second kernel joins (flash decoding). Keys are visited in tiles that begin
at multiples of `TILE_KEYS` whatever the chunk, so a token's sums without splits depend on nothing but its own context.
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


@triton.jit(do_not_specialize=["num_requests", "table_stride", "window"])
def _attend(
    q,
    keys,
    values,
    output,
    parts,
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
    IS_SPLIT: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
        is_column = column < HEAD_DIM
        token = (start + index).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        loaded = is_row[:, None] & is_column[None, :]
        query = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], loaded, 0.0)
        position = computed + index

        # |begin|<- keys of this split ->|stop|, within what the tile's first and last token see.
        last = computed + tl.minimum(first + TILE_TOKENS, query_len)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(computed + first - window + 1, 0) // TILE * TILE
        share = tl.cdiv(tl.cdiv(last - begin, tl.num_programs(2)), TILE) * TILE
        begin += split * share
        stop = tl.minimum(begin + share, last)

        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, WIDTH], tl.float32)
        for key in range(begin, stop, TILE):
            place = key + tl.arange(0, TILE)
            is_key = place < stop
            page = tl.load(page_table + request * table_stride + place // PAGE_SIZE, is_key, 0).to(tl.int64)
            source = ((page * PAGE_SIZE + place % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
            wanted = is_key[:, None] & is_column[None, :]
            k = tl.load(keys + source[:, None] + column[None, :], wanted, 0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            is_visible = is_key[None, :] & (place[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_visible = is_visible & (place[None, :] > position[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            # A row that has seen nothing yet has no highest score; a difference of infinities would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(highest - base)
            # Slots outside of the request are loaded as zeros: a weight of 0 does not hide a NaN.
            v = tl.load(values + source[:, None] + column[None, :], wanted, 0.0)
            total = total * kept + tl.sum(weights, 1)
            attended = attended * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher

        if not IS_SPLIT:
            target = output + (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
            tl.store(target, (attended / total[:, None]).to(output.dtype.element_ty), loaded)
        else:
            # Of each split: the unscaled sum, its highest score, its total weight.
            part = (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * tl.num_programs(2) + split
            tl.store(parts + part[:, None] * (HEAD_DIM + 2) + column[None, :], attended, loaded)
            tl.store(parts + part * (HEAD_DIM + 2) + HEAD_DIM, highest, is_row)
            tl.store(parts + part * (HEAD_DIM + 2) + HEAD_DIM + 1, total, is_row)


@triton.jit
def _join(
    parts, output, query_starts, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """One program per request and head: its splits, weighted by how high their scores were."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    source = parts + ((request * HEADS + head) * SPLITS + split) * (HEAD_DIM + 2)
    highest = tl.load(source + HEAD_DIM)
    total = tl.load(source + HEAD_DIM + 1)
    weights = tl.exp2(highest - tl.max(highest, 0))
    wanted = (total > 0)[:, None] & (column < HEAD_DIM)[None, :]
    attended = tl.load(source[:, None] + column[None, :], wanted, 0.0)
    joined = tl.sum(attended * weights[:, None], 0) / tl.sum(total * weights, 0)
    token = tl.load(query_starts + request).to(tl.int64)
    target = output + (token * HEADS + head) * HEAD_DIM + column
    tl.store(target, joined.to(output.dtype.element_ty), column < HEAD_DIM)


def attend_prompts(q: torch.Tensor, kv: PagedKV, output: torch.Tensor, scale: float, window: int | None) -> None:
    """Attention of requests with any number of tokens, without splits.

    Args:
        q: [T, num_heads, head_dim], heads contiguous, tokens with any stride; also holds tokens of other requests.
        output: [T, num_heads, head_dim] contiguous; only the tokens of these requests are written.
        window: a token sees itself and at most window - 1 tokens before it; None: all.
    """
    group = q.shape[1] // kv.keys.shape[2]
    rows = DECODE_ROWS if q.is_cuda and q.dtype == torch.float32 else PROMPT_ROWS
    tokens = max(2, rows // group)
    # The tokens from the first of these requests on bound their tiles from above; the host knows no more.
    most = q.shape[0] // tokens + len(kv.context_lens)
    _launch(q, kv, output, output, scale, window, tokens, (most, 1))


def attend_decodes(
    q: torch.Tensor, kv: PagedKV, output: torch.Tensor, scale: float, window: int | None, splits: int
) -> None:
    """Attention of requests with one token each, their contexts split among `splits` programs, a power of two."""
    num_requests, num_heads, head_dim = len(kv.context_lens), q.shape[1], q.shape[2]
    if splits == 1:
        _launch(q, kv, output, output, scale, window, 1, (num_requests, 1))
        return
    parts = torch.empty(num_requests, num_heads, splits, head_dim + 2, dtype=torch.float32, device=q.device)
    _launch(q, kv, output, parts, scale, window, 1, (num_requests, splits))
    _join[(num_requests, num_heads)](
        parts, output, kv.query_starts, num_heads, head_dim, triton.next_power_of_2(head_dim), splits
    )


def _launch(
    q: torch.Tensor,
    kv: PagedKV,
    output: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
    window: int | None,
    tile_tokens: int,
    grid: tuple[int, int],
) -> None:
    page_size, num_kv_heads, head_dim = kv.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    rows = max(DECODE_ROWS, triton.next_power_of_2(tile_tokens * group))
    _attend[(grid[0], num_kv_heads, grid[1])](
        q,
        kv.keys,
        kv.values,
        output,
        parts,
        kv.page_table,
        kv.query_starts,
        kv.context_lens,
        len(kv.context_lens),
        scale * LOG2_E,
        q.stride(0),
        kv.page_table.stride(0),
        window or 0,
        PAGE_SIZE=page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        TILE_TOKENS=tile_tokens,
        ROWS=rows,
        TILE=TILE_KEYS,
        HAS_WINDOW=window is not None,
        IS_SPLIT=grid[1] > 1,
        num_warps=8 if rows > 64 else 4,
        num_stages=2,
    )
