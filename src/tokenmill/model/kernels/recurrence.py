"""Layers that keep a state of each request instead of its keys and values, in plain torch: the kernels' reference.

A state is read and written in place, in a memory of states [slots, ...]; each request of a step names its slot. The
tokens of a request are taken one after the other, so the numbers are the same however a prompt is cut into steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from tokenmill.model.kernels.states import StateRows

# Below the root of the sum of squares of a query or a key; that of fla, which the models were trained with.
L2_EPS = 1e-6


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    silu: bool = False,
) -> None:
    """Run a causal convolution over the tokens of each request, channel by channel.

    Args:
        x: [T, C]. weight: [C, K], whose last tap meets the token itself. bias: [C].
        state: [slots, C, K - 1], the inputs before the step, oldest first; overwritten with those before the next one,
            as the states below are too, if `rows.keeps`.
        out: [T, C] in x's dtype, written for the tokens of `rows`; other tokens are left as they are.
        silu: apply SiLU to the result.
    """
    before = state[rows.slots]
    for number, (start, end) in enumerate(rows.spans.tolist()):
        inputs = torch.cat((before[number], x[start:end].T), -1)
        windows = inputs.float().unfold(-1, weight.shape[1], 1)
        mixed = torch.einsum("ctk,ck->tc", windows, weight.float())
        mixed = mixed if bias is None else mixed + bias.float()
        out[start:end] = functional.silu(mixed) if silu else mixed
        before[number] = inputs[:, inputs.shape[1] - state.shape[2] :]
    if rows.keeps:
        state[rows.slots] = before


def delta_rule(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Run the gated delta rule (Yang et al. 2024), one token after the other, in float32.

        S = exp(g) S;   S = S + k (v - S^T k)^T beta;   out = S^T q

    with q and k of length 1, q over the root of its size, beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias).

    Args:
        mixed: [T, 2 * Hk * Dk + Hv * Dv], q and k of all key heads, v of all value heads; Hv / Hk value heads share a
            key head.
        gates: [T, 2 * Hv], b and then a of all value heads.
        a_log, dt_bias: [Hv].
        state: [slots, Hv, Dk, Dv] float32.
        out: [T, Hv * Dv] in the dtype of `mixed`, written for the tokens of `rows`; other tokens are left as they are.
    """
    _, num_heads, key_size, value_size = state.shape
    keys_width = (mixed.shape[1] - num_heads * value_size) // 2
    q, k, v = mixed.float().split((keys_width, keys_width, num_heads * value_size), -1)
    q, k = (_unit(each.reshape(len(mixed), -1, key_size)) for each in (q, k))
    group = num_heads // q.shape[1]
    q, k = (q * key_size**-0.5).repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    v = v.reshape(len(mixed), num_heads, value_size)
    b, a = gates.float().chunk(2, -1)
    beta, decay = b.sigmoid(), torch.exp(-a_log.float().exp() * functional.softplus(a + dt_bias.float()))
    heads, lengths, states = out.view_as(v), rows.spans[:, 1] - rows.spans[:, 0], state[rows.slots]
    for step in range(int(lengths.max())):
        active = torch.from_numpy(np.flatnonzero(lengths > step)).to(mixed.device)
        at = rows.starts[active].long() + step
        now = states[active] * decay[at][..., None, None]
        wrong = (v[at] - (now * k[at].unsqueeze(-1)).sum(-2)) * beta[at].unsqueeze(-1)
        now += k[at].unsqueeze(-1) * wrong.unsqueeze(-2)
        heads[at] = (now * q[at].unsqueeze(-1)).sum(-2).to(out.dtype)
        states[active] = now
    if rows.keeps:
        state[rows.slots] = states


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
    """Run a state space (Mamba-2: Dao and Gu 2024), one token after the other, in float32.

        S = exp(-exp(a_log) step) S + B (step x)^T;   out = S^T C + skip x

    with step = softplus(steps + dt_bias).

    Args:
        mixed: [T, H * P + 2 * G * N], x of all heads, B and C of all groups; H / G heads share a group.
        steps: [T, H].
        a_log, dt_bias, skip: [H].
        state: [slots, H, N, P] float32.
        out: [T, H * P] in the dtype of `mixed`, written for the tokens of `rows`; other tokens are left as they are.
    """
    _, num_heads, state_size, size = state.shape
    width = num_heads * size
    x, b, c = mixed.float().split((width, *[(mixed.shape[1] - width) // 2] * 2), -1)
    x = x.reshape(len(mixed), num_heads, size)
    b, c = (each.reshape(len(mixed), -1, state_size) for each in (b, c))
    b, c = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (b, c))
    step = functional.softplus(steps.float() + dt_bias.float())
    decay, added = torch.exp(-a_log.float().exp() * step), x * step.unsqueeze(-1)
    heads, lengths, states = out.view_as(x), rows.spans[:, 1] - rows.spans[:, 0], state[rows.slots]
    for number in range(int(lengths.max())):
        active = torch.from_numpy(np.flatnonzero(lengths > number)).to(mixed.device)
        at = rows.starts[active].long() + number
        now = states[active] * decay[at][..., None, None] + b[at].unsqueeze(-1) * added[at].unsqueeze(-2)
        read = (now * c[at].unsqueeze(-1)).sum(-2)
        heads[at] = (read + skip.float().unsqueeze(-1) * x[at]).to(out.dtype)
        states[active] = now
    if rows.keeps:
        state[rows.slots] = states


def gated_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """Return the norm of x * silu(gate), both [T, N], over each group of numbers, times weight [N].

    The product and its norm are computed in float32, and the norm is rounded to x's dtype before the weight.
    """
    product = x.float() * functional.silu(gate.float())
    wide = product.view(len(x), num_groups, -1)
    normed = functional.rms_norm(wide, wide.shape[2:], None, eps)
    return weight * normed.to(x.dtype).view_as(x)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), both [T, N] of one dtype; x may be overwritten."""
    return x.mul_(torch.sigmoid(gate))


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of x [T, heads * size] over each head, times weight [size], times silu(gate) [T, heads * size].

    The norm is computed in float32 and rounded to x's dtype before the product with the weight, as in transformers.
    """
    wide = x.view(len(x), -1, len(weight))
    normed = weight * functional.rms_norm(wide.float(), weight.shape, None, eps).to(x.dtype)
    return (normed * functional.silu(gate.float().view_as(wide))).to(x.dtype).view_as(x)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
