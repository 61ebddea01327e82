"""Random steps of requests with states, for the kernels of recurrent layers: poisoned where nobody may look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tokenmill.kernels.recurrence import StateRows

SLOTS = 9


def step_of(slots: list[int], lengths: list[int], device: str = "cpu") -> StateRows:
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return StateRows(torch.tensor(slots, device=device), torch.from_numpy(starts).to(device), starts)


def draw_step(rng: np.random.Generator, most_tokens: int, device: str = "cpu") -> StateRows:
    """One to five requests, some of one token."""
    count = int(rng.integers(1, 6))
    lengths = rng.integers(1, most_tokens + 1, count) if rng.random() < 0.7 else np.ones(count, int)
    return step_of(rng.permutation(SLOTS)[:count].tolist(), lengths.tolist(), device)


def cut(rows: StateRows, rng: np.random.Generator) -> list[tuple[torch.Tensor, StateRows]]:
    """The same tokens in steps, in which requests take turns: which of the tokens a step has, and its rows."""
    bounds = list(zip(rows.query_starts[:-1].tolist(), rows.query_starts[1:].tolist(), strict=True))
    steps = []
    while any(start < end for start, end in bounds):
        tokens, slots, lengths = [], [], []
        for number, (start, end) in enumerate(bounds):
            taken = min(int(rng.integers(0, 6)), end - start)
            if taken:
                tokens += range(start, start + taken)
                slots.append(int(rows.slots[number]))
                lengths.append(taken)
                bounds[number] = start + taken, end
        if slots:
            steps.append((torch.tensor(tokens, device=rows.slots.device), step_of(slots, lengths, rows.slots.device)))
    return steps


def poison(state: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """NaN in all slots but those of the step."""
    poisoned = torch.full_like(state, torch.nan)
    slots = rows.slots.to(state.device)
    poisoned[slots] = state[slots]
    return poisoned


@dataclass(frozen=True)
class Conv:
    """What `short_conv` takes but for the rows."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    silu: bool

    def arguments(self, rows: StateRows) -> tuple:
        return self.x, self.weight, self.bias, self.state, rows, self.silu

    def of(self, tokens: torch.Tensor, state: torch.Tensor) -> Conv:
        return replace(self, x=self.x[tokens], state=state)

    def copy(self) -> Conv:
        return replace(self, state=self.state.clone())


@dataclass(frozen=True)
class Delta:
    """What `delta_rule` takes but for the rows."""

    mixed: torch.Tensor
    gates: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor

    def arguments(self, rows: StateRows) -> tuple:
        return self.mixed, self.gates, self.a_log, self.dt_bias, self.state, rows

    def of(self, tokens: torch.Tensor, state: torch.Tensor) -> Delta:
        return replace(self, mixed=self.mixed[tokens], gates=self.gates[tokens], state=state)

    def copy(self) -> Delta:
        return replace(self, state=self.state.clone())


def draw_conv(
    rng: np.random.Generator,
    rows: StateRows,
    channels: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Conv:
    """The rows of x lie apart, as parts of wider ones."""
    tokens = int(rows.query_starts[-1])
    x = torch.randn(tokens, channels + 8)[:, 3 : channels + 3]
    weight, bias = torch.randn(channels, width), torch.randn(channels) if rng.random() < 0.5 else None
    state = poison(torch.randn(SLOTS, channels, width - 1), rows)
    x, weight, state = (each.to(device, dtype) for each in (x, weight, state))
    return Conv(x, weight, None if bias is None else bias.to(device, dtype), state, bool(rng.random() < 0.5))


def draw_delta(
    rng: np.random.Generator,
    rows: StateRows,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Delta:
    """Key heads and value heads, and the sizes of both; decays of models, from hardly any to nearly all."""
    tokens, width = int(rows.query_starts[-1]), 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    mixed = torch.randn(tokens, width) * float(10.0 ** rng.uniform(-1, 1))
    gates = torch.randn(tokens, 2 * heads[1]) * 3
    a_log, dt_bias = torch.empty(heads[1]).uniform_(0.01, 16).log(), torch.randn(heads[1]) * 4 - 4
    inputs = (each.to(device, dtype) for each in (mixed, gates, a_log, dt_bias))
    state = poison(torch.randn(SLOTS, heads[1], *sizes) * 0.3, rows)
    return Delta(*inputs, state.to(device))
