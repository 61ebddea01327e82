"""Norm and rotate q and k, and write k and v into the cache, in one pass over memory before the attention.

The reference is `kernels.heads.split_heads` and a write into the pool.

Estimate, not measured: 4 bytes a number of qkv and 30 instructions; 256 tokens of 32 heads of 128 are 4.2 MB, a
microsecond on an H200, in 8,192 programs of one warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
from tokenmill.model.kernels.triton.launch import dependent, follow

# Heads of a program: enough bytes on their way from one warp, and always as many, so that bits do not depend on T.
HEADS_TILE = 8


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _place_heads(
    qkv,
    q_norm,
    k_norm,
    cos_table,
    sin_table,
    positions,
    slots,
    keys,
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ARE_OFFSETS: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotate and place TILE heads of one token per program, a warp: q is written back, k and v go to their slot.

    Cost (estimated for an H200 at 4.3 TB/s, not measured): reads and writes each head once, 4 * head_dim bytes in half
    precision, and an angle of 4 * HALF bytes for each program. 8,192 tokens with 32 heads of 128: 134 MB and 32,768
    programs, 32 us a layer; 2 KiB from each of the 32 warps that a multiprocessor holds are twice what keeps its
    memory busy, where a program for each head had 256 bytes.
    """
    # No kernel writes weights, so they need not wait. Those of wide heads would take registers from the heads.
    IS_EARLY: tl.constexpr = HAS_NORMS and WIDTH <= 128
    if not IS_EARLY:
        follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    is_column = column < HALF
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_column[None, :]
    weight = tl.where(is_query, q_norm + column[None, :], k_norm + column[None, :])
    if IS_EARLY:
        low_scale = tl.load(weight, inside, 0.0).to(tl.float32)
        high_scale = tl.load(weight + HALF, inside, 0.0).to(tl.float32)
        follow(PDL)
    # What other loads and stores wait for comes first.
    slot = tl.load(slots + token) if NUM_KV_HEADS > 0 else 0
    position = tl.load(positions + token) if ROTATES else 0
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(source, inside, 0.0)
    second = tl.load(source + HALF, inside, 0.0)
    dtype = first.dtype
    low = first.to(tl.float32)
    high = second.to(tl.float32)
    if HAS_NORMS:
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        if not IS_EARLY:
            low_scale = tl.load(weight, inside, 0.0).to(tl.float32)
            high_scale = tl.load(weight + HALF, inside, 0.0).to(tl.float32)
        # Rounded where the reference rounds: after the norm, unless weights are offsets, and after its weight.
        if ARE_OFFSETS:
            low = (low * factor * (1.0 + low_scale)).to(dtype).to(tl.float32)
            high = (high * factor * (1.0 + high_scale)).to(dtype).to(tl.float32)
        else:
            low = ((low * factor).to(dtype).to(tl.float32) * low_scale).to(dtype).to(tl.float32)
            high = ((high * factor).to(dtype).to(tl.float32) * high_scale).to(dtype).to(tl.float32)
    if ROTATES:
        angle = position * HALF + column
        cos = tl.load(cos_table + angle, is_column, 0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_table + angle, is_column, 0.0).to(tl.float32)[None, :]
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if NORMS_VALUES:
        value_low = first.to(tl.float32) * factor
        value_high = second.to(tl.float32) * factor
        first = value_low.to(dtype)
        second = value_high.to(dtype)
    first = tl.where(is_value, first, low.to(dtype))
    second = tl.where(is_value, second, high.to(dtype))
    tl.store(source, first, inside & is_query)
    tl.store(source + HALF, second, inside & is_query)
    if NUM_KV_HEADS > 0:
        kv_head = (head + NUM_KV_HEADS - NUM_HEADS % NUM_KV_HEADS) % NUM_KV_HEADS
        place = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + column[None, :]
        target = tl.where(is_value, values + place, keys + place)
        tl.store(target, first, inside & ~is_query)
        tl.store(target + HALF, second, inside & ~is_query)


def place_heads(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary: RotaryTables | None,
    places: tuple[torch.Tensor, torch.Tensor],
    memory: tuple[torch.Tensor, torch.Tensor],
    reads_only: bool = False,
) -> torch.Tensor:
    """Norm and rotate q in place; norm and rotate k, and write k and v into the cache.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim] contiguous.
        norms: None for no norms. A norm of values has no weight.
        rotary: None for no rotation.
        places: positions and slots of the tokens, [T] int64 each.
        memory: keys and values of a layer, [pages, page_size, num_kv_heads, head_dim] contiguous.
        reads_only: qkv is q alone, and nothing is written.

    Returns:
        q, a view [T, num_heads, head_dim] of qkv.
    """
    num_kv_heads, head_dim = memory[0].shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_kv_heads = 0 if reads_only else num_kv_heads
    num_heads = heads.shape[1] - 2 * num_kv_heads
    weights = (qkv, qkv) if norms is None else (norms.q, norms.k)
    _place_heads[(heads.shape[0], triton.cdiv(heads.shape[1], HEADS_TILE))](
        qkv,
        *weights,
        *((qkv, qkv) if rotary is None else (rotary.cos, rotary.sin)),
        *places,
        *memory,
        0.0 if norms is None else norms.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        TILE=HEADS_TILE,
        HAS_NORMS=norms is not None,
        ARE_OFFSETS=norms is not None and norms.are_offsets,
        ROTATES=rotary is not None,
        NORMS_VALUES=norms is not None and norms.v is not None,
        num_warps=1,
        **dependent(qkv),
    )
    return heads[:, :num_heads]
