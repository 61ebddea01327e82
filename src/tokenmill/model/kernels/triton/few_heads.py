"""Compute the heads of q, k and v for the few rows of a decode, and place them, in one kernel.

A head is made by several programs, so that there are enough of them to read W; the last of them to finish norms,
rotates and places it. The reference is a product (`few_rows`) and `place_heads` behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.heads import HeadPlaces
from tokenmill.model.kernels.triton.few_rows import NormBefore, few_rows, product_tile, tiling_for
from tokenmill.model.kernels.triton.heads import norm_and_rotate, place_heads
from tokenmill.model.kernels.triton.launch import dependent, is_on_gpu

# Of heads and blocks of rows together; with more, heads are placed by a kernel of their own.
MOST_COUNTERS = 1024


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _few_heads(
    x,
    weight,
    scales,
    bias,
    norm,
    output,
    q_norm,
    k_norm,
    cos_table,
    sin_table,
    positions,
    slots,
    keys,
    values,
    counters,
    num_rows,
    eps,
    head_eps,
    SIZE,
    DEPTH,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    PREFETCHES: tl.constexpr,
    BY_BITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ARE_OFFSETS: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Make `COLUMNS` numbers of a head; the program that completes it places it."""
    result, target, inside, _ = product_tile(
        x,
        weight,
        scales,
        bias,
        norm,
        output,
        num_rows,
        eps,
        SIZE,
        DEPTH,
        ROWS,
        COLUMNS,
        TILE,
        -1,
        HAS_SCALES,
        HAS_BIAS,
        True,
        IS_OFFSET,
        False,
        PREFETCHES,
        BY_BITS,
        PDL,
    )
    PIECES: tl.constexpr = 2 * HALF // COLUMNS
    head = tl.program_id(0) // PIECES
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_row, is_column = row < num_rows, column < HALF
    wanted = is_row[:, None] & is_column[None, :]
    # What the last program needs besides the head is on its way while it waits for the count.
    slot = tl.load(slots + row, is_row, 0)
    low_scale, high_scale, cos, sin = 0.0, 0.0, 0.0, 0.0
    if HAS_NORMS:
        head_norm = tl.where(is_query, q_norm + column, k_norm + column)
        low_scale = tl.load(head_norm, is_column, 0.0).to(tl.float32)[None, :]
        high_scale = tl.load(head_norm + HALF, is_column, 0.0).to(tl.float32)[None, :]
    if ROTATES:
        angle = tl.load(positions + row, is_row, 0)[:, None] * HALF + column[None, :]
        cos = tl.load(cos_table + angle, wanted, 0.0).to(tl.float32)
        sin = tl.load(sin_table + angle, wanted, 0.0).to(tl.float32)
    tl.store(target, result, inside)
    counter = counters + tl.program_id(1) * (NUM_HEADS + 2 * NUM_KV_HEADS) + head
    # All threads have written before one counts, and read what others wrote behind the count.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") + 1 == PIECES:
        tl.store(counter, 0)
        source = output + row[:, None] * SIZE + (head * (2 * HALF) + column)[None, :]
        first = tl.load(source, wanted, 0.0, cache_modifier=".cg")
        second = tl.load(source + HALF, wanted, 0.0, cache_modifier=".cg")
        first, second = norm_and_rotate(
            first,
            second,
            low_scale,
            high_scale,
            cos,
            sin,
            head_eps,
            HALF,
            HAS_NORMS,
            ARE_OFFSETS,
            ROTATES,
            NORMS_VALUES,
            is_value,
        )
        if is_query:
            tl.store(source, first, wanted)
            tl.store(source + HALF, second, wanted)
        else:
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            place = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + column[None, :]
            memory = tl.where(is_value, values + place, keys + place)
            tl.store(memory, first, wanted)
            tl.store(memory + HALF, second, wanted)


def few_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    norm: NormBefore,
    heads: HeadPlaces,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Return q of the normed x [T, in_size], a view [T, num_heads, head_dim], with k and v placed.

    Args:
        weight, bias, scales: see `few_rows`.
        counters: [`MOST_COUNTERS`] int32 zeros, which they are again afterwards.
    """
    num_kv_heads, head_dim = heads.memory[0].shape[2:]
    (size, depth), own = weight.shape, tiling_for(weight.shape[0], len(x), False, scales is not None)
    num_heads, blocks = size // head_dim - 2 * num_kv_heads, triton.cdiv(len(x), own.rows)
    is_whole = head_dim % own.columns == 0 and blocks * (size // head_dim) <= MOST_COUNTERS
    if heads.reads_only or not is_whole or not len(x):
        qkv = few_rows(x, weight, bias, None, scales, norm=norm)
        return place_heads(qkv, heads)
    output, norms, rotary = x.new_empty(len(x), size), heads.norms, heads.rotary
    is_compiled = is_on_gpu(x)
    _few_heads[(size // own.columns, blocks)](
        *(x, weight, scales, bias, norm.weight, output),
        *((output, output) if norms is None else (norms.q, norms.k)),
        *((output, output) if rotary is None else (rotary.cos, rotary.sin)),
        *(*heads.places, *heads.memory, counters, len(x), norm.eps, 0.0 if norms is None else norms.eps, size, depth),
        *(own.rows, own.columns, own.depth, scales is not None, bias is not None, norm.is_offset),
        *(own.prefetches and is_compiled, is_compiled and x.dtype == torch.bfloat16),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        HAS_NORMS=norms is not None,
        ARE_OFFSETS=norms is not None and norms.are_offsets,
        ROTATES=rotary is not None,
        NORMS_VALUES=norms is not None and norms.v is not None,
        num_warps=own.warps,
        num_stages=own.stages,
        **dependent(x),
    )
    return output.view(len(x), -1, head_dim)[:, :num_heads]
