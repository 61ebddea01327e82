"""Attention of prompts on Hopper in the manner of FlashAttention-3 (Shah et al. 2024), in Gluon.

A warp of its own loads keys and values, a page's part of them by each copy of the copy engine; two groups of four warps
multiply, 64 rows of a tile each. A group asks for the scores of the next keys, then for the sums of values of the
ones before, and computes weights while the matrix units do the second, or work for the other group:

    loads     |k0|v0|k1|v1|       |k2|v2| ...
    group     q k0 | weights 0 | q k1 , p0 v0 | weights 1 | q k2 , p1 v1 | ...

Tiles of keys begin at multiples of `TILE_KEYS`, so a token's sums depend on its own context only.
"""

from __future__ import annotations

import msgspec
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.model.kernels.triton.attention import LOG2_E, PagedKV, Scores
from tokenmill.model.kernels.triton.search import find_group, first_row

# Triton 3.7 has another name for it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _load_tile(desc, rows, column, full, boxes, base, COUNT: gl.constexpr, HALVES: gl.constexpr, WIDE: gl.constexpr):
    for box in gl.static_range(COUNT):
        for half in gl.static_range(HALVES):
            target = boxes.index(base + half * COUNT + box)
            tma.async_copy_global_to_shared(desc, [rows[box], column + half * WIDE], full, target)


@gluon.jit
def _page_rows(pages, key, stop, COUNT: gl.constexpr, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr):
    rows = gl.tuple(())
    for box in gl.static_range(COUNT):
        place = key + box * BOX
        page = gl.load(pages + place // PAGE_SIZE, place < stop, 0)
        rows = rows + gl.tuple((page * PAGE_SIZE + place % PAGE_SIZE,))
    return rows


@gluon.jit
def _find_tile(
    base,
    num_work,
    query_starts,
    context_lens,
    num_requests,
    window,
    NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    # Programs take tiles forwards and backwards in turn, so that each has about as many keys.
    is_back = base // gl.num_programs(0) % 2 == 1
    work = base + gl.where(is_back, gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(0))
    is_there = work < num_work
    work = gl.minimum(work, num_work - 1)
    kv_head = work % NUM_KV_HEADS
    # The tiles that see the most keys come first.
    tile = num_work // NUM_KV_HEADS - 1 - work // NUM_KV_HEADS
    request = tile
    first = 0
    if TILE_TOKENS > 1:
        request = find_group(query_starts, tile, num_requests, TILE_TOKENS)
        first = first_row(query_starts, tile, request, TILE_TOKENS)
    start = gl.load(query_starts + request)
    query_len = gl.load(query_starts + request + 1) - start
    computed = gl.load(context_lens + request) - query_len
    begin = 0
    if HAS_WINDOW:
        begin = gl.maximum(computed + first - window + 1, 0) // TILE * TILE
    stop = computed + gl.minimum(first + TILE_TOKENS, query_len)
    query_len = gl.where(is_there, query_len, 0)
    return kv_head, request, first, start, query_len, computed, begin, stop


@gluon.jit
def _load(
    k_desc,
    v_desc,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    landed,
    page_table,
    query_starts,
    context_lens,
    num_work,
    num_requests,
    table_stride,
    window,
    PAGE_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    BOX: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    WIDE: gl.constexpr = k_desc.block_type.shape[1]
    HALVES: gl.constexpr = HEAD_DIM // WIDE
    COUNT: gl.constexpr = TILE // BOX
    BYTES: gl.constexpr = TILE * HEAD_DIM * 2
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
    k_boxes = k_tiles._reinterpret(dtype, [STAGES * HALVES * COUNT, BOX, WIDE], k_desc.layout)
    v_boxes = v_tiles._reinterpret(dtype, [STAGES * HALVES * COUNT, BOX, WIDE], v_desc.layout)
    pieces = v_tiles._reinterpret(dtype, [STAGES * HALVES * (TILE // 8), 8, WIDE], v_desc.layout)
    turn = 0
    done = 0
    for base in range(0, num_work, gl.num_programs(0)):
        kv_head, request, first, start, query_len, computed, begin, stop = _find_tile(
            base,
            num_work,
            query_starts,
            context_lens,
            num_requests,
            window,
            NUM_KV_HEADS,
            TILE_TOKENS,
            TILE,
            HAS_WINDOW,
        )
        if first < query_len:
            column = kv_head * HEAD_DIM
            pages = page_table + request.to(gl.int64) * table_stride
            # |begin| whole tiles |last| the last one, of which only the slots before stop are anyone's |stop|
            last = (stop - 1) // TILE * TILE
            for key in range(begin, stop, TILE):
                rows = _page_rows(pages, key, stop, COUNT, BOX, PAGE_SIZE)
                stage = turn % STAGES
                phase = (turn // STAGES & 1) ^ 1
                box = stage * (HALVES * COUNT)
                is_whole = key + TILE <= stop
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BYTES)
                _load_tile(k_desc, rows, column, k_full.index(stage), k_boxes, box, COUNT, HALVES, WIDE)
                mbarrier.wait(v_empty.index(stage), phase)
                if is_whole:
                    mbarrier.expect(v_full.index(stage), BYTES)
                    _load_tile(v_desc, rows, column, v_full.index(stage), v_boxes, box, COUNT, HALVES, WIDE)
                else:
                    mbarrier.expect(landed, BYTES)
                    _load_tile(v_desc, rows, column, landed, v_boxes, box, COUNT, HALVES, WIDE)
                    mbarrier.wait(landed, done & 1)
                    # A weight of 0 does not hide a NaN: slots outside of the request become zeros.
                    for piece in range((stop - last) // 8, TILE // 8):
                        place = last + piece * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
                        for half in gl.static_range(HALVES):
                            values = pieces.index((stage * HALVES + half) * (TILE // 8) + piece)
                            nothing = gl.zeros([8, WIDE], dtype, layout)
                            values.store(gl.where((place < stop)[:, None], values.load(layout), nothing))
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(v_full.index(stage))
                    done += 1
                turn += 1


@gluon.jit
def _weigh(scores, highest, total, scale):
    higher = gl.maximum(highest, gl.max(scores, 1))
    # A row that has seen nothing yet has no highest score; a difference of infinities would be NaN.
    base = gl.where(higher == float("-inf"), 0.0, higher)
    # Fused by name: a row's bits are the same where the mask is compiled and where it is not.
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-(base * scale), 1)))
    kept = gl.exp2((highest - base) * scale)
    total = gl.fma(total, kept, gl.sum(weights, 1))
    return weights, kept, higher, total


@gluon.jit
def _hide(scores, key, position, window, HAS_WINDOW: gl.constexpr):
    layout: gl.constexpr = scores.type.layout
    place = key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
    is_visible = place[None, :] <= position[:, None]
    if HAS_WINDOW:
        is_visible = is_visible & (place[None, :] > position[:, None] - window)
    return gl.where(is_visible, scores, float("-inf"))


@gluon.jit
def _multiply(
    GROUP_OF_WARPS: gl.constexpr,
    queries,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    pins,
    q,
    output,
    sinks,
    query_starts,
    context_lens,
    num_work,
    num_requests,
    q_stride,
    scale,
    window,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    ALL_MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    PINS: gl.constexpr,
):
    dtype: gl.constexpr = k_tiles.dtype
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, of_scores)

    row = GROUP_OF_WARPS * 64 + gl.arange(0, 64, gl.SliceLayout(1, plain))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, plain))
    scored_row = GROUP_OF_WARPS * 64 + gl.arange(0, 64, row_layout)
    own = queries.index(GROUP_OF_WARPS)
    nothing = gl.zeros([64, TILE], gl.float32, of_scores)
    turn = 0
    for base in range(0, num_work, gl.num_programs(0)):
        kv_head, request, first, start, query_len, computed, begin, stop = _find_tile(
            base,
            num_work,
            query_starts,
            context_lens,
            num_requests,
            window,
            NUM_KV_HEADS,
            TILE_TOKENS,
            TILE,
            HAS_WINDOW,
        )
        if first < query_len:
            index = first + row // GROUP
            is_row = (row < TILE_TOKENS * GROUP) & (index < query_len)
            token = (start + index).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            source = q + (token * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
            own.store(gl.load(source, is_row[:, None], 0.0))
            fence_async_shared()
            barrier()

            position = computed + first + scored_row // GROUP
            highest = gl.full([64], float("-inf"), gl.float32, row_layout)
            total = gl.zeros([64], gl.float32, row_layout)
            sums = gl.zeros([64, HEAD_DIM], gl.float32, of_sums)
            stage = turn % STAGES
            mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
            if TAKES_TURNS:
                mbarrier.wait(turns.index(GROUP_OF_WARPS), turn & 1)
            scores = warpgroup_mma(own, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if TAKES_TURNS:
                mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS))
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(stage))
            scores = _hide(scores, begin, position, window, HAS_WINDOW)
            weights, kept, highest, total = _weigh(scores, highest, total, scale)
            weights = gl.convert_layout(weights.to(dtype), of_weights)
            turn += 1
            clear = begin + TILE
            if not ALL_MASKED:
                clear = gl.maximum(clear, (computed + first + 1) // TILE * TILE)
            for masked in gl.static_range(ALL_MASKED, 2):
                for key in range(begin + TILE if masked == 0 else clear, clear if masked == 0 else stop, TILE):
                    stage = turn % STAGES
                    before = (turn - 1) % STAGES
                    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
                    if TAKES_TURNS:
                        mbarrier.wait(turns.index(GROUP_OF_WARPS), turn & 1)
                    scores = warpgroup_mma(
                        own, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
                    )
                    mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
                    sums = warpgroup_mma(weights, v_tiles.index(before), sums, is_async=True)
                    if TAKES_TURNS:
                        mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS))
                    scores = warpgroup_mma_wait(1, [scores])
                    mbarrier.arrive(k_empty.index(stage))
                    if masked == 1:
                        scores = _hide(scores, key, position, window, HAS_WINDOW)
                    fresh, kept, highest, total = _weigh(scores, highest, total, scale)
                    if PINS:
                        pins.index(GROUP_OF_WARPS).store(total)
                    sums = warpgroup_mma_wait(0, [sums])
                    mbarrier.arrive(v_empty.index(before))
                    sums = sums * gl.convert_layout(kept, gl.SliceLayout(1, of_sums))[:, None]
                    weights = gl.convert_layout(fresh.to(dtype), of_weights)
                    turn += 1
            before = (turn - 1) % STAGES
            mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
            sums = warpgroup_mma(weights, v_tiles.index(before), sums, is_async=True)
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(v_empty.index(before))

            if HAS_SINKS:
                sink = gl.load(sinks + kv_head * GROUP + scored_row % GROUP).to(gl.float32)
                total += gl.exp2(sink * 1.4426950408889634 - highest * scale)
            sums = sums / gl.convert_layout(total, gl.SliceLayout(1, of_sums))[:, None]
            own.store(sums.to(dtype))
            barrier()
            result = own.load(plain)
            target = output + ((token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + column[None, :]
            gl.store(target, result, is_row[:, None])
            barrier()


@gluon.jit(
    do_not_specialize=["num_work", "num_requests", "table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens"],
)
def _attend_prompts(
    q,
    k_desc,
    v_desc,
    output,
    page_table,
    query_starts,
    context_lens,
    sinks,
    num_work,
    num_requests,
    scale,
    q_stride,
    table_stride,
    window,
    PAGE_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    BOX: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    PINS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [GROUPS, 64, HEAD_DIM], wide)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], wide)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], wide)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pins = gl.allocate_shared_memory(gl.float32, [GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    if TAKES_TURNS:
        mbarrier.arrive(turns.index(0))
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_load, (k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, landed, page_table, query_starts, context_lens, num_work, num_requests, table_stride, window, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE_TOKENS, TILE, STAGES, BOX, HAS_WINDOW)),
            ],
            [1],
            [LOADERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_multiply, (1, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_load, (k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, landed, page_table, query_starts, context_lens, num_work, num_requests, table_stride, window, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE_TOKENS, TILE, STAGES, BOX, HAS_WINDOW)),
            ],
            [4, 1],
            [REGISTERS, LOADERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_multiply, (1, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_multiply, (2, queries, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, pins, q, output, sinks, query_starts, context_lens, num_work, num_requests, q_stride, scale, window, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_TOKENS, TILE, STAGES, GROUPS, HAS_WINDOW, HAS_WINDOW, HAS_SINKS, TAKES_TURNS, PINS)),
                (_load, (k_desc, v_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, landed, page_table, query_starts, context_lens, num_work, num_requests, table_stride, window, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE_TOKENS, TILE, STAGES, BOX, HAS_WINDOW)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADERS],
        )


class Tiling(msgspec.Struct, frozen=True):
    """Keys of a tile, tiles of keys and values on their way, groups of four warps, and how the groups keep in step."""

    keys: int
    stages: int
    groups: int
    takes_turns: bool = False
    pins: bool = True
    programs: int = 0
    registers: int = 232
    loaders: int = 40


def attend(
    q: torch.Tensor, kv: PagedKV, output: torch.Tensor, scores: Scores, tiling: Tiling, *, are_single: bool = False
) -> None:
    """Attend as `attend_prompts` does."""
    num_pages, page_size, num_kv_heads, head_dim = kv.keys.shape
    group = q.shape[1] // num_kv_heads
    groups = 1 if are_single else tiling.groups
    tokens = 1 if are_single else max(2, 64 * groups // group)
    tiles = len(kv.context_lens) + (0 if are_single else q.shape[0] // tokens)
    box = min(page_size, tiling.keys)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides = [num_pages * page_size, num_kv_heads * head_dim], [num_kv_heads * head_dim, 1]
    keys, values = (TensorDescriptor(part, shape, strides, [box, 64], layout) for part in (kv.keys, kv.values))
    num_work = tiles * num_kv_heads
    _attend_prompts[(min(num_work, tiling.programs or num_work),)](
        *(q, keys, values, output, kv.page_table, kv.query_starts, kv.context_lens),
        *(output if scores.sinks is None else scores.sinks, num_work, len(kv.context_lens), scores.scale * LOG2_E),
        *(q.stride(0), kv.page_table.stride(0), scores.window or 0),
        PAGE_SIZE=page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        TILE_TOKENS=tokens,
        TILE=tiling.keys,
        STAGES=tiling.stages,
        GROUPS=groups,
        BOX=box,
        HAS_WINDOW=scores.window is not None,
        HAS_SINKS=scores.sinks is not None,
        TAKES_TURNS=tiling.takes_turns and groups == 2,
        PINS=tiling.pins,
        REGISTERS=tiling.registers,
        LOADERS=tiling.loaders,
        num_warps=4,
    )
