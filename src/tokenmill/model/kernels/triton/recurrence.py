"""Layers that keep a state of each request: short convolutions, delta rule, state spaces, and the gates behind them.

The reference is `kernels.recurrence`. The first token of a request is read on the device, so a captured graph serves
any slots. A token's bits depend neither on how its request is cut into steps nor on the other requests: its numbers
are added in one order, by the same code whether it comes alone or in a prompt.

Estimate, not measured: a decode of 64 requests reads and writes 268 MB of states of 32 heads of 128 by 128, 62 us on an
H200 at 4.3 TB/s. A prompt is bound by its tokens following one another: two sums over the rows of a state, a product
and an update take some 300 cycles, so 8,192 tokens 1.4 ms a layer, however many programs share its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.model.kernels.recurrence import L2_EPS
from tokenmill.model.kernels.states import StateRows
from tokenmill.model.kernels.triton.launch import dependent, follow
from tokenmill.model.kernels.triton.search import find_group, first_row

# Tokens and channels of a program of the convolution. It needs the K - 1 tokens behind a state in one tile with it.
CONV_TOKENS, CONV_CHANNELS = 16, 128
# Columns of a state that a warp holds in its registers, 64 numbers a thread with 128 rows: sums need no other warp.
COLUMNS = 16
# Heads, and numbers, of a program of the gates.
HEADS_TILE, WIDTH_TILE = 8, 1024


@triton.jit
def _tap(x, before, at, first, channel, inside, x_stride, TAPS: tl.constexpr):
    """Load inputs number `at` of the step, or from the state where they precede the request's first."""
    is_new = at >= first
    new = tl.load(x + at.to(tl.int64) * x_stride + channel, inside & is_new, 0.0)
    old = tl.load(before + channel * (TAPS - 1) + at - first + TAPS - 1, inside & ~is_new, 0.0)
    return tl.where(is_new, new, old)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["slots", "starts", "stops"])
def _short_conv(
    x,
    weight,
    bias,
    before,
    slots,
    starts,
    stops,
    output,
    num_requests,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a tile of a request's tokens and a block of channels per program; a first tile also writes the state.

    No other program reads the old state.
    """
    follow(PDL)
    request = find_group(starts, tl.program_id(0), num_requests, TILE)
    row = first_row(starts, tl.program_id(0), request, TILE)
    first = tl.load(starts + request)
    end = tl.load(stops + request)
    if first + row >= end:
        return
    before += tl.load(slots + request) * state_stride
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    token = (first + row + tl.arange(0, TILE))[:, None]
    inside = (channel < CHANNELS) & (token < end)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        numbers = _tap(x, before, token - TAPS + 1 + tap, first, channel, inside, x_stride, TAPS)
        factors = tl.load(weight + channel * TAPS + tap, channel < CHANNELS, 0.0)
        # A fused product wherever it is compiled: bits do not depend on the size of the tile.
        wide = tl.broadcast_to(factors.to(tl.float32), TILE, BLOCK)
        total = tl.fma(numbers.to(tl.float32), wide, total)
    if HAS_BIAS:
        total += tl.load(bias + channel, channel < CHANNELS, 0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + token.to(tl.int64) * CHANNELS + channel, total.to(output.dtype.element_ty), inside)
    if KEEPS and row == 0:
        place = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
        kept = (channel < CHANNELS) & (place < TAPS - 1)
        inputs = _tap(x, before, end - TAPS + 1 + place, first, channel, kept, x_stride, TAPS)
        # Other threads of the program have read what this one overwrites.
        tl.debug_barrier()
        tl.store(before + channel * (TAPS - 1) + place, inputs, kept)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    silu: bool = False,
) -> None:
    """Run the causal convolution of each request; each row, each state and `out` contiguous. K is at most 17."""
    (channels, taps), num_requests = weight.shape, len(rows.slots)
    assert taps <= CONV_TOKENS + 1, "a state is read by one program"
    assert out.is_contiguous(), "its rows follow one another"
    tile = 1 if (rows.spans[:, 1] - rows.spans[:, 0] == 1).all() else CONV_TOKENS
    block = CONV_CHANNELS if tile > 1 else 2 * CONV_CHANNELS
    reach = int(rows.spans[-1, 1] - rows.spans[0, 0])
    _short_conv[(reach // tile + num_requests, triton.cdiv(channels, block))](
        *(x, weight, weight if bias is None else bias, state, rows.slots, rows.starts, rows.stops, out),
        *(num_requests, x.stride(0), state.stride(0)),
        *(channels, taps, tile, block, bias is not None, silu, rows.keeps),
        **dependent(x),
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "stops"])
def _delta_rule(
    mixed,
    gates,
    a_log,
    dt_bias,
    memory,
    slots,
    starts,
    stops,
    output,
    mixed_stride,
    gates_stride,
    state_stride,
    scale,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run one request, value head and block of columns per program, a warp, with its part of the state in registers.

    As in native/isa/delta_rule.cpp, both sums are over the state before the token, so that they can run at the same
    time; the inputs of the next token are loaded meanwhile.
    """
    follow(PDL)
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < KEY_SIZE
    is_column = column < VALUE_SIZE
    token = tl.load(starts + request).to(tl.int64)
    end = tl.load(stops + request)
    inside = is_row[:, None] & is_column[None, :]
    own = memory + tl.load(slots + request) * state_stride + head * (KEY_SIZE * VALUE_SIZE)
    own += row[:, None] * VALUE_SIZE + column[None, :]
    state = tl.load(own, inside, 0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    query = mixed + token * mixed_stride + head // (HEADS // KEY_HEADS) * KEY_SIZE + row
    value = mixed + token * mixed_stride + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + column
    gate = gates + token * gates_stride + head
    q = tl.load(query, is_row & (token < end), 0.0)
    k = tl.load(query + KEY_HEADS * KEY_SIZE, is_row & (token < end), 0.0)
    v = tl.load(value, is_column & (token < end), 0.0)
    b = tl.load(gate, token < end, 0.0)
    a = tl.load(gate + HEADS, token < end, 0.0)
    for at in range(token, end):
        wide_q = q.to(tl.float32)
        wide_k = k.to(tl.float32)
        wide_v = v.to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
        step = a.to(tl.float32) + shift
        query += mixed_stride
        value += mixed_stride
        gate += gates_stride
        has_next = at + 1 < end
        q = tl.load(query, is_row & has_next, 0.0)
        k = tl.load(query + KEY_HEADS * KEY_SIZE, is_row & has_next, 0.0)
        v = tl.load(value, is_column & has_next, 0.0)
        b = tl.load(gate, has_next, 0.0)
        a = tl.load(gate + HEADS, has_next, 0.0)
        wide_q *= tl.rsqrt(tl.sum(wide_q * wide_q, 0) + eps) * scale
        wide_k *= tl.rsqrt(tl.sum(wide_k * wide_k, 0) + eps)
        decay = tl.exp(rate * tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step))))
        wrong = (wide_v - decay * tl.sum(state * wide_k[:, None], 0)) * beta
        result = decay * tl.sum(state * wide_q[:, None], 0) + tl.sum(wide_q * wide_k, 0) * wrong
        state = decay * state + wide_k[:, None] * wrong[None, :]
        tl.store(output + (at * HEADS + head) * VALUE_SIZE + column, result.to(output.dtype.element_ty), is_column)
    if KEEPS:
        tl.store(own, state, inside)


def delta_rule(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Run the gated delta rule of each request; each row, each state and `out` contiguous."""
    num_heads, key_size, value_size = state.shape[1:]
    key_heads = (mixed.shape[1] - num_heads * value_size) // (2 * key_size)
    assert out.is_contiguous(), "its rows follow one another"
    _delta_rule[(len(rows.slots) * num_heads, triton.cdiv(value_size, COLUMNS))](
        *(mixed, gates, a_log, dt_bias, state, rows.slots, rows.starts, rows.stops, out),
        *(mixed.stride(0), gates.stride(0), state.stride(0), key_size**-0.5, L2_EPS),
        *(key_heads, num_heads, key_size, value_size, triton.next_power_of_2(key_size), COLUMNS, rows.keeps),
        num_warps=1,
        **dependent(mixed),
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "stops"])
def _state_space(
    mixed,
    steps,
    a_log,
    dt_bias,
    skip,
    memory,
    slots,
    starts,
    stops,
    output,
    mixed_stride,
    steps_stride,
    state_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run one request, head and block of columns per program, a warp, with its part of the state in registers.

    The inputs of the next token are loaded while the state takes in those of this one.
    """
    follow(PDL)
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < STATE_SIZE
    is_column = column < SIZE
    token = tl.load(starts + request).to(tl.int64)
    end = tl.load(stops + request)
    inside = is_row[:, None] & is_column[None, :]
    own = memory + tl.load(slots + request) * state_stride + head * (STATE_SIZE * SIZE)
    own += row[:, None] * SIZE + column[None, :]
    state = tl.load(own, inside, 0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    kept = tl.load(skip + head).to(tl.float32)
    value = mixed + token * mixed_stride + head * SIZE + column
    key = mixed + token * mixed_stride + HEADS * SIZE + head // (HEADS // GROUPS) * STATE_SIZE + row
    time = steps + token * steps_stride + head
    x = tl.load(value, is_column & (token < end), 0.0)
    b = tl.load(key, is_row & (token < end), 0.0)
    c = tl.load(key + GROUPS * STATE_SIZE, is_row & (token < end), 0.0)
    t = tl.load(time, token < end, 0.0)
    for at in range(token, end):
        wide_x = x.to(tl.float32)
        wide_b = b.to(tl.float32)
        wide_c = c.to(tl.float32)
        step = t.to(tl.float32) + shift
        value += mixed_stride
        key += mixed_stride
        time += steps_stride
        has_next = at + 1 < end
        x = tl.load(value, is_column & has_next, 0.0)
        b = tl.load(key, is_row & has_next, 0.0)
        c = tl.load(key + GROUPS * STATE_SIZE, is_row & has_next, 0.0)
        t = tl.load(time, has_next, 0.0)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        state = tl.exp(rate * step) * state + wide_b[:, None] * (step * wide_x)[None, :]
        result = tl.sum(state * wide_c[:, None], 0) + kept * wide_x
        tl.store(output + (at * HEADS + head) * SIZE + column, result.to(output.dtype.element_ty), is_column)
    if KEEPS:
        tl.store(own, state, inside)


def state_space(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Run the state space of each request; each row, each state and `out` contiguous."""
    num_heads, state_size, size = state.shape[1:]
    groups = (mixed.shape[1] - num_heads * size) // (2 * state_size)
    assert out.is_contiguous(), "its rows follow one another"
    _state_space[(len(rows.slots) * num_heads, triton.cdiv(size, COLUMNS))](
        *(mixed, steps, a_log, dt_bias, skip, state, rows.slots, rows.starts, rows.stops, out),
        *(mixed.stride(0), steps.stride(0), state.stride(0)),
        *(groups, num_heads, size, state_size, triton.next_power_of_2(state_size), COLUMNS, rows.keeps),
        num_warps=1,
        **dependent(mixed),
    )


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    output,
    x_stride,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and gate TILE heads of one token per program, a warp."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < HEADS) & (column < SIZE)
    place = head * SIZE + column
    values = tl.load(x + token * x_stride + place, inside, 0.0)
    opened = tl.load(gate + token * gate_stride + place, inside, 0.0).to(tl.float32)
    factors = tl.load(weight + column, column < SIZE, 0.0).to(tl.float32)
    wide = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    normed = ((wide * factor).to(values.dtype).to(tl.float32) * factors).to(values.dtype).to(tl.float32)
    result = normed * (opened / (1.0 + tl.exp(-opened)))
    tl.store(output + token * (HEADS * SIZE) + place, result.to(values.dtype), inside)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of x over each head, times the weight and silu(gate); each row contiguous."""
    output, size = x.new_empty(x.shape), len(weight)
    heads = x.shape[1] // size
    if len(x):
        _gated_norm[(len(x), triton.cdiv(heads, HEADS_TILE))](
            *(x, gate, weight, output, x.stride(0), gate.stride(0), eps),
            *(heads, size, triton.next_power_of_2(size), HEADS_TILE),
            num_warps=1,
            **dependent(x),
        )
    return output


@triton.jit
def _sigmoid_gate(x, gate, output, x_stride, gate_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, inside, 0.0)
    wide = tl.load(gate + row * gate_stride + columns, inside, 0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-wide))).to(values.dtype).to(tl.float32)
    tl.store(output + row * SIZE + columns, (values.to(tl.float32) * opened).to(values.dtype), inside)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) as a new tensor; each row contiguous."""
    output, size = x.new_empty(x.shape), x.shape[1]
    if len(x):
        width = min(WIDTH_TILE, triton.next_power_of_2(size))
        grid = len(x), triton.cdiv(size, width)
        _sigmoid_gate[grid](x, gate, output, x.stride(0), gate.stride(0), size, width, **dependent(x))
    return output
