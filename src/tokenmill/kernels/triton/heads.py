"""What happens to q, k and v between the projection and the attention, in one pass over memory.

Norms of the heads of q and k, their rotation, and the write of k and v into the cache. The reference is
`kernels.heads.split_heads` and a write into the pool.

Estimate, not measured: 4 bytes a number of qkv and 30 instructions; 256 tokens of 32 heads of 128 are 4.2 MB, a
microsecond on an H200, in 8,192 programs of one warp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.heads import HeadNorms, RotaryTables
from tokenmill.kernels.triton.launch import dependent, follow


@triton.jit
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
    HAS_NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and head; q is written back, k and v go to their slot."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < HALF
    source = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + columns
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        dtype = first.dtype
        low = first.to(tl.float32)
        high = second.to(tl.float32)
        if HAS_NORMS:
            weight = q_norm + columns
            if head >= NUM_HEADS:
                weight = k_norm + columns
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
            low_scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            high_scale = tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
            # Rounded where the reference rounds: after the norm, and after its weight.
            low = ((low * factor).to(dtype).to(tl.float32) * low_scale).to(dtype).to(tl.float32)
            high = ((high * factor).to(dtype).to(tl.float32) * high_scale).to(dtype).to(tl.float32)
        if ROTATES:
            angle = tl.load(positions + token) * HALF + columns
            cos = tl.load(cos_table + angle, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_table + angle, mask=inside, other=0.0).to(tl.float32)
            first = (low * cos - high * sin).to(dtype)
            second = (high * cos + low * sin).to(dtype)
        else:
            first = low.to(dtype)
            second = high.to(dtype)
    if head < NUM_HEADS:
        tl.store(source, first, mask=inside)
        tl.store(source + HALF, second, mask=inside)
    else:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        place = (tl.load(slots + token) * NUM_KV_HEADS + kv_head) * (2 * HALF) + columns
        target = keys + place
        if head >= NUM_HEADS + NUM_KV_HEADS:
            target = values + place
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)


def place_heads(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary: RotaryTables | None,
    places: tuple[torch.Tensor, torch.Tensor],
    memory: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Norm and rotate q in place; norm and rotate k, and write k and v into the cache.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim] contiguous.
        rotary: None: nothing is rotated.
        places: positions and slots of the tokens, [T] int64 each.
        memory: keys and values of a layer, [pages, page_size, num_kv_heads, head_dim] contiguous.

    Returns:
        q, a view [T, num_heads, head_dim] of qkv.
    """
    num_kv_heads, head_dim = memory[0].shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    weights = (qkv, qkv) if norms is None else (norms.q, norms.k)
    _place_heads[(heads.shape[0], heads.shape[1])](
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
        HAS_NORMS=norms is not None,
        ROTATES=rotary is not None,
        num_warps=1,
        **dependent(qkv),
    )
    return heads[:, :num_heads]
