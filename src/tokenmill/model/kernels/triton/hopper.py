"""Attention of prompts on capability 9.0 in the manner of FlashAttention-3 (Shah et al. 2024), in Gluon.

A warp of its own has the copy engine bring keys and values, a page's part by each copy. Two groups of four warps take
64 rows of a tile each (the heads of a group of some tokens, as in `attention`). A group asks for the scores of the next
keys, then for the sums of the values of the keys before, and weighs the scores while the matrix units do the second, or
work for the other group:

    warp     |k0|v0|k1|v1|        |k2|v2|         ...
    group    |q k0|weigh 0|q k1 , w0 v0|weigh 1|q k2 , w1 v1|weigh 2| ...

The warp is ahead by `STAGES` tiles, also across the ends of tiles of queries: a program takes several of these.
Tiles of keys begin at multiples of their size whatever the chunk, so a token's sums depend only on its own context.

On an H100 80GB HBM3, 27 November 2026, 16 query and 8 key heads: 0.457 ms for 8,192 tokens (602 TFLOP/s) where
`attention` takes 0.804, whose eight warps wait for each product together; heads of 256 x1.6, heads of 64 x0.8. Compiled
for 9.0: 161 KiB, 232 registers a thread and 40 for the loads, none spilled inside of the loop without a mask.
"""

from __future__ import annotations

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

# Rows of a group of four warps, and of a tile of queries.
GROUP_ROWS = gl.constexpr(64)
TILE_ROWS = 128
STAGES = gl.constexpr(2)
# Bytes of keys and values in all stages leave room for the queries beside them.
STAGE_BYTES = 32 << 10
# Numbers to 128 bytes, the widest swizzle of shared memory: a copy has so many of a head.
COPY_WIDTH = 64
# Of keys and values in shared memory, halves of heads behind each other.
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
# Of a thread that multiplies, and of one that loads: 504 for each thread of three groups of four warps.
REGISTERS, LOADER_REGISTERS = gl.constexpr(232), gl.constexpr(40)

# Triton 3.7 has another name for it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _find_tile(base, requests, NUM_KV_HEADS: gl.constexpr, TILE_TOKENS: gl.constexpr):
    """Find the next tile of this program; its query_len is 0 if there is none."""
    _, query_starts, context_lens, num_work, num_requests, _ = requests
    # Programs take tiles forwards and backwards in turn, so that each has about as many keys.
    is_back = base // gl.num_programs(0) % 2 == 1
    work = base + gl.where(is_back, gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(0))
    is_there = work < num_work
    work = gl.minimum(work, num_work - 1)
    # The tiles that see the most keys come first, and the heads of a token together.
    tile = num_work // NUM_KV_HEADS - 1 - work // NUM_KV_HEADS
    request = find_group(query_starts, tile, num_requests, TILE_TOKENS)
    first = first_row(query_starts, tile, request, TILE_TOKENS)
    start = gl.load(query_starts + request)
    query_len = gl.load(query_starts + request + 1) - start
    computed = gl.load(context_lens + request) - query_len
    stop = computed + gl.minimum(first + TILE_TOKENS, query_len)
    return work % NUM_KV_HEADS, request, first, start, gl.where(is_there, query_len, 0), computed, stop


@gluon.jit
def _begin(computed, first, window, TILE: gl.constexpr, HAS_WINDOW: gl.constexpr):
    begin = 0
    if HAS_WINDOW:
        begin = gl.maximum(computed + first - window + 1, 0) // TILE * TILE
    return begin


@gluon.jit
def _places(pages, key, stop, COUNT: gl.constexpr, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Return where the slots of each copy of a tile begin; those past the stop are of page 0."""
    places = gl.tuple(())
    for box in gl.static_range(COUNT):
        place = key + box * BOX
        page = gl.load(pages + place // PAGE_SIZE, place < stop, 0)
        places = places + gl.tuple((page * PAGE_SIZE + place % PAGE_SIZE,))
    return places


@gluon.jit
def _copy(source, places, column, boxes, first, arrived, COUNT: gl.constexpr, HALVES: gl.constexpr):
    """Begin to copy a tile: in shared memory the halves of heads lie behind each other, |0..63| of all slots first."""
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(COUNT):
        for half in gl.static_range(HALVES):
            target = boxes.index(first + half * COUNT + box)
            tma.async_copy_global_to_shared(source, [places[box], column + half * WIDE], arrived, target)


@gluon.jit
def _load(
    sources,
    tiles,
    barriers,
    requests,
    window,
    PAGE_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """Bring the keys and values of this program's tiles, in the order in which the groups of warps take them."""
    keys, values = sources
    _, k_tiles, v_tiles, _ = tiles
    k_full, k_empty, v_full, v_empty, landed = barriers
    page_table, _, _, num_work, _, table_stride = requests
    TILE: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    BOX: gl.constexpr = keys.block_type.shape[0]
    WIDE: gl.constexpr = keys.block_type.shape[1]
    HALVES: gl.constexpr = HEAD_DIM // WIDE
    COUNT: gl.constexpr = TILE // BOX
    BYTES: gl.constexpr = TILE * HEAD_DIM * 2
    dtype: gl.constexpr = keys.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDE, WIDE // 8], [1, 1], [1, 0])
    k_boxes = k_tiles._reinterpret(dtype, [STAGES * HALVES * COUNT, BOX, WIDE], keys.layout)
    v_boxes = v_tiles._reinterpret(dtype, [STAGES * HALVES * COUNT, BOX, WIDE], keys.layout)
    eights = v_tiles._reinterpret(dtype, [STAGES * HALVES * (TILE // 8), 8, WIDE], keys.layout)
    turn = 0
    ends = 0
    for base in range(0, num_work, gl.num_programs(0)):
        found = _find_tile(base, requests, NUM_KV_HEADS, TILE_TOKENS)
        kv_head, request, first, _, query_len, computed, stop = found
        if first < query_len:
            column = kv_head * HEAD_DIM
            pages = page_table + request.to(gl.int64) * table_stride
            for key in range(_begin(computed, first, window, TILE, HAS_WINDOW), stop, TILE):
                # Pages are looked up before the wait for a free stage.
                places = _places(pages, key, stop, COUNT, BOX, PAGE_SIZE)
                stage = turn % STAGES
                phase = (turn // STAGES & 1) ^ 1
                box = stage * (HALVES * COUNT)
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BYTES)
                _copy(keys, places, column, k_boxes, box, k_full.index(stage), COUNT, HALVES)
                mbarrier.wait(v_empty.index(stage), phase)
                if key + TILE <= stop:
                    mbarrier.expect(v_full.index(stage), BYTES)
                    _copy(values, places, column, v_boxes, box, v_full.index(stage), COUNT, HALVES)
                else:
                    mbarrier.expect(landed, BYTES)
                    _copy(values, places, column, v_boxes, box, landed, COUNT, HALVES)
                    mbarrier.wait(landed, ends & 1)
                    # Slots outside of the request become zeros: a weight of 0 does not hide a NaN.
                    for eight in range((stop - key) // 8, TILE // 8):
                        place = key + eight * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
                        for half in gl.static_range(HALVES):
                            slots = eights.index((stage * HALVES + half) * (TILE // 8) + eight)
                            nothing = gl.zeros([8, WIDE], dtype, layout)
                            slots.store(gl.where((place < stop)[:, None], slots.load(layout), nothing))
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(v_full.index(stage))
                    ends += 1
                turn += 1


@gluon.jit
def _weigh(scores, highest, total, scale):
    """Return weights as in `attention._attend`, what is kept of the sums before, and the new highest and total."""
    higher = gl.maximum(highest, gl.max(scores, 1))
    # A row that has seen nothing yet has no highest score; a difference of infinities would be NaN.
    base = gl.where(higher == float("-inf"), 0.0, higher)
    # Fused by name: a row's bits are the same where the mask is compiled and where it is not.
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-(base * scale), 1)))
    kept = gl.exp2((highest - base) * scale)
    return weights, kept, higher, gl.fma(total, kept, gl.sum(weights, 1))


@gluon.jit
def _hide(scores, place, position, window, HAS_WINDOW: gl.constexpr):
    is_visible = place[None, :] <= position[:, None]
    if HAS_WINDOW:
        is_visible = is_visible & (place[None, :] > position[:, None] - window)
    return gl.where(is_visible, scores, float("-inf"))


@gluon.jit
def _multiply(
    WARPS: gl.constexpr,
    tiles,
    barriers,
    requests,
    rows,
    window,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Attend for the rows of one group of warps, in all tiles of this program."""
    queries, k_tiles, v_tiles, pins = tiles
    k_full, k_empty, v_full, v_empty, _ = barriers
    _, _, _, num_work, _, _ = requests
    q, output, sinks, q_stride, scale = rows
    TILE: gl.constexpr = k_tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_tiles.shape[2]
    dtype: gl.constexpr = k_tiles.dtype
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    row = WARPS * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, plain))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, plain))
    scored_row = WARPS * GROUP_ROWS + gl.arange(0, GROUP_ROWS, of_rows)
    slot = gl.arange(0, TILE, gl.SliceLayout(0, of_scores))
    own = queries.index(WARPS)
    nothing = gl.zeros([GROUP_ROWS, TILE], gl.float32, of_scores)
    turn = 0
    for base in range(0, num_work, gl.num_programs(0)):
        found = _find_tile(base, requests, NUM_KV_HEADS, TILE_TOKENS)
        kv_head, _, first, start, query_len, computed, stop = found
        if first < query_len:
            begin = _begin(computed, first, window, TILE, HAS_WINDOW)
            index = first + row // GROUP
            is_row = ((row < TILE_TOKENS * GROUP) & (index < query_len))[:, None]
            token = (start + index).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            own.store(gl.load(q + (token * q_stride + head * HEAD_DIM)[:, None] + column[None, :], is_row, 0.0))
            fence_async_shared()
            barrier()

            position = computed + first + scored_row // GROUP
            highest = gl.full([GROUP_ROWS], float("-inf"), gl.float32, of_rows)
            total = gl.zeros([GROUP_ROWS], gl.float32, of_rows)
            sums = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, of_sums)
            stage = turn % STAGES
            mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
            scores = warpgroup_mma(own, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(stage))
            scores = _hide(scores, begin + slot, position, window, HAS_WINDOW)
            weights, kept, highest, total = _weigh(scores, highest, total, scale)
            weights = gl.convert_layout(weights.to(dtype), of_weights)
            turn += 1
            # |begin|first tile|<- keys that all rows see ->|clear|<- keys that some see ->|stop|
            clear = begin + TILE
            if not HAS_WINDOW:
                clear = gl.maximum(clear, (computed + first + 1) // TILE * TILE)
            for phase in gl.static_range(HAS_WINDOW, 2):
                for key in range(begin + TILE if phase == 0 else clear, clear if phase == 0 else stop, TILE):
                    stage = turn % STAGES
                    before = (turn - 1) % STAGES
                    mbarrier.wait(k_full.index(stage), turn // STAGES & 1)
                    k = k_tiles.index(stage).permute((1, 0))
                    scores = warpgroup_mma(own, k, nothing, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(before), (turn - 1) // STAGES & 1)
                    sums = warpgroup_mma(weights, v_tiles.index(before), sums, is_async=True)
                    scores = warpgroup_mma_wait(1, [scores])
                    mbarrier.arrive(k_empty.index(stage))
                    if phase == 1:
                        scores = _hide(scores, key + slot, position, window, HAS_WINDOW)
                    fresh, kept, highest, total = _weigh(scores, highest, total, scale)
                    # Without a store of what the weights make, ptxas puts the wait in front of them.
                    pins.index(WARPS).store(total)
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
            # By way of the queries' memory, for stores of whole rows.
            own.store(sums.to(dtype))
            barrier()
            target = output + ((token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + column[None, :]
            gl.store(target, own.load(plain), is_row)
            barrier()


@gluon.jit(
    do_not_specialize=["num_work", "num_requests", "table_stride", "window"],
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
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Give the warps of a program their tasks."""
    dtype: gl.constexpr = keys.dtype
    wide: gl.constexpr = keys.layout
    word: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, HEAD_DIM], wide)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], wide)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], wide)
    pins = gl.allocate_shared_memory(gl.float32, [2, GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], word)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], word)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], word)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], word)
    landed = gl.allocate_shared_memory(gl.int64, [1], word)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(landed, count=1)
    fence_async_shared()
    tiles = (queries, k_tiles, v_tiles, pins)
    barriers = (k_full, k_empty, v_full, v_empty, landed)
    requests = (page_table, query_starts, context_lens, num_work, num_requests, table_stride)
    rows = (q, output, sinks, q_stride, scale)
    sources = (keys, values)
    gl.warp_specialize(
        [
            (
                _multiply,
                (0, tiles, barriers, requests, rows, window, NUM_KV_HEADS, GROUP, TILE_TOKENS, HAS_WINDOW, HAS_SINKS),
            ),
            (
                _multiply,
                (1, tiles, barriers, requests, rows, window, NUM_KV_HEADS, GROUP, TILE_TOKENS, HAS_WINDOW, HAS_SINKS),
            ),
            (_load, (sources, tiles, barriers, requests, window, PAGE_SIZE, NUM_KV_HEADS, TILE_TOKENS, HAS_WINDOW)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


def shape_obstacle(capability: tuple[int, int], head_dim: int, group: int, page_size: int) -> str | None:
    """Return the reason that this kernel does not serve, or None. It can take heads of 64, which gain nothing by it."""
    if capability[0] != 9:
        return "the kernel for Hopper is made for capability 9.0"
    if head_dim not in (128, 256) or group > GROUP_ROWS.value:
        return "the kernel for Hopper takes heads of 128 or 256, at most 64 of them to a key head"
    if page_size < 16 or page_size & (page_size - 1):
        return "the kernel for Hopper takes pages of 16, 32, 64 and so on"
    return None


def attend_prompts(q: torch.Tensor, kv: PagedKV, output: torch.Tensor, scores: Scores, num_programs: int) -> None:
    """Attend as `attention.attend_prompts` does, in half precision.

    Args:
        num_programs: how many programs take tiles in turn: one for each multiprocessor, whose memory one fills.
    """
    num_pages, page_size, num_kv_heads, head_dim = kv.keys.shape
    group = q.shape[1] // num_kv_heads
    tokens = max(2, TILE_ROWS // group)
    num_work = (len(kv.context_lens) + q.shape[0] // tokens) * num_kv_heads
    tile = min(TILE_ROWS, STAGE_BYTES // (head_dim * q.element_size()))
    shape, box = [num_pages * page_size, num_kv_heads * head_dim], [min(page_size, tile), COPY_WIDTH]
    sources = [TensorDescriptor(part, shape, [shape[1], 1], box, LAYOUT) for part in (kv.keys, kv.values)]
    _attend_prompts[(min(num_work, num_programs),)](
        *(q, *sources, output, kv.page_table, kv.query_starts, kv.context_lens),
        *(output if scores.sinks is None else scores.sinks, num_work, len(kv.context_lens), scores.scale * LOG2_E),
        *(q.stride(0), kv.page_table.stride(0), scores.window or 0),
        PAGE_SIZE=page_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        TILE_TOKENS=tokens,
        TILE=tile,
        HAS_WINDOW=scores.window is not None,
        HAS_SINKS=scores.sinks is not None,
        num_warps=4,
    )
