"""Attention over pages: flash attention (Dao et al. 2022) with an online softmax, for prompts and for decodes.

A tile is some tokens of one request times the heads that share a key head, so that keys are read once for all of them.
Tokens of prompts take tiles of many tokens. Requests with a single token (decodes) take tiles of one, and split their
contexts among programs, whose parts a second kernel joins (flash decoding):

|256|256| ... 16 of them |512|512| ... 16 of them |1024| ...      keys of split 0, 1, ... of every request

The start of a split depends only on the position: neither on the batch nor on the length. So a decode's sums have one
order in every batch, and a context of any length has few enough splits to keep their parts in memory. Prompts visit
keys in tiles that begin at multiples of `TILE_KEYS` whatever the chunk, so there, too, a token's sums depend only on
its own context.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.triton.join import JOIN_WARPS, join_splits
from tokenmill.model.kernels.triton.launch import dependent, follow
from tokenmill.model.kernels.triton.pieces import (
    bounds_of,
    do_share,
    find_tile,
    first_record,
    item_of,
    page_ids,
    query_len_of,
    read_record,
    read_sharers,
)
from tokenmill.model.kernels.triton.splits import (
    DECODE_ROWS,
    LEVEL_SPLITS,
    PART_EXTRA,
    PROMPT_ROWS,
    SPLIT_KEYS,
    SPLIT_REGISTERS,
    Splits,
)

LOG2_E = 1.4426950408889634
TILE_KEYS = 64
# Of a tile of one token whose sums must be those of a tile of many. On capability 9.0 both run the same instructions
# on 64 rows, one group of four warps here and two there, so no row can tell; elsewhere warps would part the columns.
SINGLE_ROWS = 64
# Splits of so many tokens at most begin while the kernel in front ends, and let the join do so. On an H100 a step of 1,
# 8 and 64 requests of Qwen3-0.6B at 1,024 tokens takes 1.19, 1.54 and 4.18 ms instead of 1.22, 1.70 and 4.34; of 256 it
# takes 12.8 instead of 12.5.
MOST_EARLY = 64
# A third stage of keys and values fits beside a tile of queries up to this many bytes of a head.
THREE_STAGES_BYTES = 256

Tile = tuple[int, int, int]
"""Tokens and rows of a tile, and how many tiles there are."""


class Scores(msgspec.Struct, frozen=True):
    """Scale, window and sinks for the scores of a layer.

    Attributes:
        scale: factor on q.k.
        window: a token sees itself and at most window - 1 tokens before it; None for all tokens before it.
        sinks, ahead: see `AttentionLayer`; decodes see nothing ahead.
    """

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    ahead: int | None = 0


class PagedKV(msgspec.Struct, frozen=True):
    """A layer's memory and each request's part of it; B requests, tensors on the device.

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


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "window", "after"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens", "sights"],
)
def _attend(
    q,
    keys,
    values,
    output,
    records,
    stops,
    parts,
    members,
    page_table,
    query_starts,
    context_lens,
    sinks,
    sights,
    num_requests,
    scale,
    q_stride,
    table_stride,
    window,
    after,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LEVEL: tl.constexpr,
    PART: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SIGHTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SHARES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend per tile and key head, the tiles that see the most keys first; each program takes several splits.

    Estimated for an H200 at 4.3 TB/s and 790 TFLOP/s, not measured; half precision, 16 query and 8 key heads of 128.

    Decodes read 4 * context * head_dim bytes a key head, once. 256 requests at 1,024 tokens: 1.07 GB a layer, 0.25 ms
    at full rate, 80 to 90% of it expected; 8,192 pieces of 128 KiB for 396 programs. A piece waits for its queries and
    page ids, then for its first keys (`pieces.py`), some 1 us of its 12, while the other two programs of the
    multiprocessor have one to two tiles of 32 KiB each on their way (compiled for 9.0: copies of 16 bytes, two groups
    left open at a wait); 33 KiB for each multiprocessor at all times would be the whole rate. Parts: 8 * GROUP *
    head_dim bytes written and read per piece, 2% more. As many programs as run at once, not one for each split that a
    graph must allow for: at 256 rows and 40,960 tokens those would be 110,000 a layer, and starting them for nothing
    takes 0.1 to 0.3 ms.

    Of splits that requests share a tile holds the rows of ROWS / GROUP requests, which cost no more than those of one:
    N requests with L of their C keys in common read N (C - L) + L N GROUP / ROWS instead of N C. 256 requests of 2,560
    keys, 2,048 of them in common, two heads to a key head: 0.27 + 0.13 GB a layer instead of 2.7, 0.09 ms instead of
    0.62 at full rate. They are found in one launch a step (`split_lists.py`).

    Prompts: a tile of R rows at context c does 4 * R * c * head_dim FLOP on 4 * c * head_dim bytes, mostly out of the
    L2 cache. 8,192 tokens: 275 GFLOP a layer, 0.35 ms at full rate, 0.6 to 0.7 ms expected, because products wait for
    the softmax between them (warps are not specialized); 1,024 programs, the longest of 128 turns, of which only the
    last TILE_TOKENS / TILE + 1 compare positions.
    """
    follow(PDL)
    num_work = tl.load(stops + num_requests - 1) * NUM_KV_HEADS if IS_SPLIT else tl.num_programs(0)
    if IS_SPLIT:
        number = tl.program_id(0)
        record = first_record(records, item_of(number, num_work, NUM_KV_HEADS, HEADS_FIRST), number < num_work)
        later = tl.program_id(0) + tl.num_programs(0)
        next_record = read_record(records, item_of(later, num_work, NUM_KV_HEADS, HEADS_FIRST), later < num_work)
        sharers = read_sharers(members, record[2], num_requests, GROUP, ROWS, SHARES)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        # The heads of a token lie side by side: with these first they are read at about the same time.
        kv_head = work % NUM_KV_HEADS if HEADS_FIRST else work // (num_work // NUM_KV_HEADS)
        item = item_of(work, num_work, NUM_KV_HEADS, HEADS_FIRST)
        first, split = 0, 0
        if IS_SPLIT:
            request, split, start, length = record
            in_common, sharer, sharer_part = sharers
            # What the next pieces begin with comes while this one streams: they ask for queries and pages at once.
            record = next_record
            later = work + 2 * tl.num_programs(0)
            next_record = read_record(records, item_of(later, num_work, NUM_KV_HEADS, HEADS_FIRST), later < num_work)
            sharers = read_sharers(members, record[2], num_requests, GROUP, ROWS, SHARES)
            query_len = query_len_of(query_starts, request, TILE_TOKENS)
        else:
            tile = num_work // NUM_KV_HEADS - 1 - item
            request, first = find_tile(query_starts, tile, num_requests, TILE_TOKENS)
            start = tl.load(query_starts + request)
            query_len = tl.load(query_starts + request + 1) - start
            length = tl.load(context_lens + request)
        # A split does not wait to know whether its request has tokens: it writes none, then.
        has_rows = True if IS_SPLIT else first < query_len
        if has_rows:
            computed = length - query_len
            row = tl.arange(0, ROWS)
            index = first + row // GROUP
            is_row = (row < TILE_TOKENS * GROUP) & (index < query_len)
            column = tl.arange(0, WIDTH)
            is_column = column < HEAD_DIM
            position = computed + index
            token = (start + index).to(tl.int64)
            head = kv_head * GROUP + row % GROUP
            part = item
            slot = index
            if SHARES:
                is_row = do_share(in_common, split, GROUP, ROWS)
                token = sharer.to(tl.int64)
                part = sharer_part + split
                slot = 0
                position = computed + tl.zeros([ROWS], tl.int32)
            loaded = is_row[:, None] & is_column[None, :]
            query = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], loaded, 0.0)

            # |begin|<- keys that all rows see ->|clear|<- keys that some see ->|stop|
            lowest = tl.maximum(computed + first - window + 1, 0) if HAS_WINDOW else 0
            last_seen = tl.load(sights + token, is_row, 0) if HAS_SIGHTS else position + after
            end = length if IS_SPLIT else computed + tl.minimum(first + TILE_TOKENS + after, query_len)
            stop = tl.max(last_seen, 0) + 1 if HAS_SIGHTS else end
            begin, stop = bounds_of(split, lowest // TILE * TILE, stop, SPLIT, LEVEL, IS_SPLIT)
            clear = begin if ALL_MASKED else (computed + first + 1) // TILE * TILE

            highest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            attended = tl.zeros([ROWS, WIDTH], tl.float32)
            pages = page_table + request.to(tl.int64) * table_stride
            place = begin + tl.arange(0, TILE)
            page = page_ids(pages, place, stop, PAGE_SIZE, IS_SPLIT)
            for phase in tl.static_range(ALL_MASKED, 2):
                for key in range(begin, clear if phase == 0 else stop, TILE):
                    place = key + tl.arange(0, TILE)
                    # Keys wait for their page's id, so it is asked for a turn ahead.
                    ahead = page_ids(pages, place + TILE, stop, PAGE_SIZE, IS_SPLIT)
                    source = ((page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
                    # Slots outside of the request are loaded as zeros: a weight of 0 does not hide a NaN.
                    # So are keys behind all rows' windows, whose pages may be gone.
                    is_key = ((place < stop) | (phase == 0)) & ((place >= lowest) | (HAS_WINDOW == 0))
                    wanted = is_key[:, None] & is_column[None, :]
                    k = tl.load(keys + source[:, None] + column[None, :], wanted, 0.0)
                    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
                    if phase == 1:
                        is_visible = is_key[None, :] & (place[None, :] <= last_seen[:, None])
                        if HAS_WINDOW:
                            is_visible = is_visible & (place[None, :] > position[:, None] - window)
                        scores = tl.where(is_visible, scores, float("-inf"))
                    higher = tl.maximum(highest, tl.max(scores, 1))
                    # A row that has seen nothing yet has no highest score; a difference of infinities would be NaN.
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    # Fused by name: a row's bits are the same where the mask is compiled and where it is not.
                    weights = tl.exp2(tl.fma(scores, scale, -(base * scale)[:, None]))
                    kept = tl.exp2((highest - base) * scale)
                    v = tl.load(values + source[:, None] + column[None, :], wanted, 0.0)
                    total = tl.fma(total, kept, tl.sum(weights, 1))
                    attended = tl.dot(weights.to(v.dtype), v, attended * kept[:, None], input_precision="ieee")
                    highest = higher
                    page = ahead
                begin = clear

            if IS_SPLIT:
                target = parts + ((part.to(tl.int64) * TILE_TOKENS + slot) * (NUM_KV_HEADS * GROUP) + head) * PART
                tl.store(target[:, None] + column[None, :], attended, loaded)
                tl.store(target + HEAD_DIM, highest * scale, is_row)
                tl.store(target + HEAD_DIM + 1, total, is_row)
            else:
                total += _sink_weights(sinks, head, tl.where(is_row, highest, 0.0) * scale, HAS_SINKS)
                target = output + (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
                tl.store(target, (attended / total[:, None]).to(output.dtype.element_ty), loaded)


@triton.jit
def _sink_weights(sinks, heads, highest, HAS_SINKS: tl.constexpr):
    """Return the sinks' part of the sums of the weights of some heads, relative to the highest score."""
    weights = tl.zeros_like(highest)
    if HAS_SINKS:
        weights = tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - highest)
    return weights


def attend_prompts(
    q: torch.Tensor,
    kv: PagedKV,
    output: torch.Tensor,
    scores: Scores,
    *,
    are_single: bool = False,
    sights: torch.Tensor | None = None,
) -> None:
    """Attend for requests with any number of tokens.

    Args:
        q: [T, num_heads, head_dim], heads contiguous, tokens with any stride; also holds tokens of other requests.
        output: [T, num_heads, head_dim] contiguous; only the tokens of these requests are written.
        are_single: each request has one token, whose sums equal those that it would have in a longer chunk: on a GPU of
            capability 9.0, by the layout of the compiled code (`tests/model/kernels/test_triton_compiles.py`).
        sights: [T] int32 on the device, the last position that each token sees; None: as the layer says.
    """
    rows = DECODE_ROWS if q.is_cuda and q.dtype == torch.float32 else SINGLE_ROWS if are_single else PROMPT_ROWS
    tokens = 1 if are_single else max(2, rows // (q.shape[1] // kv.keys.shape[2]))
    # The tokens from the first of these requests on bound their tiles from above; the host knows no more.
    tiles = len(kv.context_lens) + (0 if are_single else q.shape[0] // tokens)
    _launch(q, kv, output, None, scores, (tokens, rows, tiles), sights)


def attend_decodes(q: torch.Tensor, kv: PagedKV, output: torch.Tensor, scores: Scores, splits: Splits | None) -> None:
    """Attend for requests with one token each, or with drafts behind it; layers may share splits, one after the other.

    Args:
        q: as in `attend_prompts`; for n requests n * t tokens, at most t per request. Tokens past the last request
            belong to none.
    """
    num_requests, (num_tokens, num_heads, _) = len(kv.context_lens), q.shape
    tokens = num_tokens // num_requests
    if splits is None:
        tokens = min(tokens, PROMPT_ROWS // (num_heads // kv.keys.shape[2]))
        tiles = num_requests if tokens == 1 else num_requests + num_tokens // tokens
        _launch(q, kv, output, None, scores, (tokens, DECODE_ROWS, tiles))
    else:
        attend_splits(q, kv, splits, scores)
        join(splits.parts, splits.stops, kv.query_starts, output, scores.sinks, tokens)


def attend_splits(q: torch.Tensor, kv: PagedKV, splits: Splits, scores: Scores) -> None:
    """Attend for requests split by split, and leave the parts of their sums in `splits`; see `attend_decodes`."""
    num_requests = len(kv.context_lens)
    _launch(q, kv, splits.parts, splits, scores, (len(q) // num_requests, DECODE_ROWS, num_requests))


def join(
    parts: torch.Tensor,
    stops: torch.Tensor,
    query_starts: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
    tokens: int = 1,
) -> None:
    """Join the parts of all splits, request by request and in the order of their keys.

    Args:
        parts, stops: as in `Splits`. query_starts: as in `PagedKV`.
        output: as in `attend_prompts`.
        tokens: the most tokens that a request has.
    """
    num_heads, head_dim = output.shape[1:]
    join_splits[(len(stops) * tokens, num_heads)](
        *(parts, stops, output, query_starts, output if sinks is None else sinks),
        *(num_heads, head_dim, triton.next_power_of_2(head_dim), head_dim + PART_EXTRA, LEVEL_SPLITS, tokens),
        HAS_SINKS=sinks is not None,
        num_warps=JOIN_WARPS,
        **dependent(output),
    )


def _launch(
    q: torch.Tensor,
    kv: PagedKV,
    out: torch.Tensor,
    splits: Splits | None,
    scores: Scores,
    tile: Tile,
    sights: torch.Tensor | None = None,
) -> None:
    (tokens, rows, tiles), window, sinks = tile, scores.window, scores.sinks
    after = 1 << 30 if scores.ahead is None else scores.ahead  # no text is as long
    shares = None if splits is None or window is not None else splits.shares
    listed = shares or splits
    page_size, num_kv_heads, head_dim = kv.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    tile_rows = max(rows, triton.next_power_of_2(tokens * group))
    is_small = tile_rows == DECODE_ROWS and q.element_size() < 4  # exact products take more
    _attend[(tiles * num_kv_heads if splits is None else splits.num_programs,)](
        *(q, kv.keys, kv.values, out),
        *((out,) * 3 if splits is None or listed is None else (listed.records, listed.stops, splits.parts)),
        *(
            out if shares is None else shares.members,
            kv.page_table,
            kv.query_starts,
            kv.context_lens,
            out if sinks is None else sinks,
        ),
        *(out if sights is None else sights, len(kv.context_lens)),
        *(scores.scale * LOG2_E, q.stride(0), kv.page_table.stride(0), window or 0, after),
        PAGE_SIZE=page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        TILE_TOKENS=tokens,
        ROWS=tile_rows,
        TILE=TILE_KEYS,
        SPLIT=SPLIT_KEYS,
        LEVEL=LEVEL_SPLITS if splits is None else splits.level,
        PART=head_dim + PART_EXTRA,
        ALL_MASKED=int(window is not None or after > 0 or rows == DECODE_ROWS),
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SIGHTS=sights is not None,
        IS_SPLIT=splits is not None,
        SHARES=shares is not None,
        HEADS_FIRST=True,
        num_warps=8 if tile_rows > 64 else 4,
        num_stages=3 if head_dim * q.element_size() <= THREE_STAGES_BYTES else 2,
        **({"maxnreg": SPLIT_REGISTERS} if splits is not None and is_small else {}),
        **(dependent(q) if splits is not None and len(q) <= MOST_EARLY else {"PDL": False}),
    )
