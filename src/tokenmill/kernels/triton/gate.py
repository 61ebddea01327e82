"""silu(gate) * up of a fused projection, in one pass over it.

Estimate, not measured: 6 bytes are read and written for each output, 15 instructions; for 256 rows of 3,072 that is
4.7 MB, 1.1 us on an H200, about what a launch costs; the launch is what overlaps with the product before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.triton.launch import dependent, follow

_WIDTH = 1024


@triton.jit
def _silu_and_mul(gate_up, output, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two, as torch rounds the result of its silu.
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * SIZE + columns, gated.to(gate.dtype), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * size] contiguous -> silu(first half) * second half, [T, size]."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        width = min(_WIDTH, triton.next_power_of_2(size))
        _silu_and_mul[(num_tokens, triton.cdiv(size, width))](gate_up, output, size, width, **dependent(gate_up))
    return output
