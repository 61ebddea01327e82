"""Random steps of requests with states, for the kernels of recurrent layers: poisoned where nobody may look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tokenmill.model.kernels.states import StateRows

SLOTS = 9
UNTOUCHED = 2.0**-12


def step_of(
    slots: Sequence[int], lengths: Sequence[int], device: str = "cpu", gaps: Sequence[int] | None = None
) -> StateRows:
    """Gaps are tokens before each span that run through no state; none if not given."""
    stops = np.cumsum(np.asarray(lengths) + (0 if gaps is None else np.asarray(gaps)))
    spans = np.stack((stops - lengths, stops), 1).astype(np.int32)
    starts, stops = torch.from_numpy(np.ascontiguousarray(spans.T)).to(device)
    return StateRows(torch.from_numpy(np.asarray(slots, np.int64)).to(device), starts, stops, spans)


def draw_step(rng: np.random.Generator, most_tokens: int, device: str = "cpu") -> StateRows:
    """One to five requests, some of one token, some behind tokens that run through no state."""
    count = int(rng.integers(1, 6))
    lengths = rng.integers(1, most_tokens + 1, count) if rng.random() < 0.7 else np.ones(count, int)
    gaps = rng.integers(0, 9, count).tolist() if rng.random() < 0.5 else None
    return step_of(rng.permutation(SLOTS)[:count].tolist(), lengths.tolist(), device, gaps)


def is_in(rows: StateRows, num_tokens: int) -> torch.Tensor:
    """Return the tokens that run through a state, [num_tokens] bool."""
    inside = torch.zeros(num_tokens, dtype=torch.bool)
    for start, stop in rows.spans.tolist():
        inside[start:stop] = True
    return inside


def run_into(out: torch.Tensor, rows: StateRows, kernel: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a kernel's output for the tokens of some rows; those of others are unchanged."""
    kernel(out.fill_(UNTOUCHED))
    outside = ~is_in(rows, len(out))
    assert (out[outside.to(out.device)] == UNTOUCHED).all(), "tokens of no row are left as they are"
    return out


def cut(rows: StateRows, rng: np.random.Generator) -> list[tuple[torch.Tensor, StateRows]]:
    """The same tokens in steps, in which requests take turns: which of the tokens a step has, and its rows."""
    bounds = rows.spans.tolist()
    steps = []
    while any(start < end for start, end in bounds):
        tokens, slots, lengths = [], [], []
        for number, (start, end) in enumerate(bounds):
            taken = min(int(rng.integers(0, 6)), end - start)
            if taken:
                tokens += range(start, start + taken)
                slots.append(int(rows.slots[number]))
                lengths.append(taken)
                bounds[number] = [start + taken, end]
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
    """The arguments of `short_conv` without the rows."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    silu: bool

    def run(self, kernel: Callable[..., None], rows: StateRows) -> torch.Tensor:
        inputs, out = (self.x, self.weight, self.bias, self.state, rows), self.x.new_empty(self.x.shape)
        return run_into(out, rows, lambda out: kernel(*inputs, out, self.silu))

    def of(self, tokens: torch.Tensor, state: torch.Tensor) -> Conv:
        return replace(self, x=self.x[tokens], state=state)

    def copy(self) -> Conv:
        return replace(self, state=self.state.clone())


@dataclass(frozen=True)
class Delta:
    """The arguments of `delta_rule` without the rows."""

    mixed: torch.Tensor
    gates: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor

    def run(self, kernel: Callable[..., None], rows: StateRows) -> torch.Tensor:
        inputs = self.mixed, self.gates, self.a_log, self.dt_bias, self.state, rows
        out = self.mixed.new_empty(len(self.mixed), self.state.shape[1] * self.state.shape[3])
        return run_into(out, rows, lambda out: kernel(*inputs, out))

    def of(self, tokens: torch.Tensor, state: torch.Tensor) -> Delta:
        return replace(self, mixed=self.mixed[tokens], gates=self.gates[tokens], state=state)

    def copy(self) -> Delta:
        return replace(self, state=self.state.clone())


@dataclass(frozen=True)
class Space:
    """The arguments of `state_space` without the rows."""

    mixed: torch.Tensor
    steps: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    state: torch.Tensor

    def run(self, kernel: Callable[..., None], rows: StateRows) -> torch.Tensor:
        vectors = self.a_log, self.dt_bias, self.skip
        out = self.mixed.new_empty(len(self.mixed), self.state.shape[1] * self.state.shape[3])
        return run_into(out, rows, lambda out: kernel(self.mixed, self.steps, *vectors, self.state, rows, out))

    def of(self, tokens: torch.Tensor, state: torch.Tensor) -> Space:
        return replace(self, mixed=self.mixed[tokens], steps=self.steps[tokens], state=state)

    def copy(self) -> Space:
        return replace(self, state=self.state.clone())


def draw_conv(
    rng: np.random.Generator,
    rows: StateRows,
    channels: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Conv:
    """The rows of x lie apart, as parts of wider ones; those of tokens in no row are NaN."""
    tokens = int(rows.spans[-1, 1]) + int(rng.integers(0, 3))
    x = torch.randn(tokens, channels + 8)[:, 3 : channels + 3]
    x[~is_in(rows, tokens)] = torch.nan
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
    """Key heads and value heads, and the sizes of both; decays of models, from hardly any to nearly all.

    Tokens in no row are NaN.
    """
    tokens, width = int(rows.spans[-1, 1]) + int(rng.integers(0, 3)), 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    mixed = torch.randn(tokens, width) * float(10.0 ** rng.uniform(-1, 1))
    mixed[~is_in(rows, tokens)] = torch.nan
    gates = torch.randn(tokens, 2 * heads[1]) * 3
    a_log, dt_bias = torch.empty(heads[1]).uniform_(0.01, 16).log(), torch.randn(heads[1]) * 4 - 4
    inputs = (each.to(device, dtype) for each in (mixed, gates, a_log, dt_bias))
    state = poison(torch.randn(SLOTS, heads[1], *sizes) * 0.3, rows)
    return Delta(*inputs, state.to(device))


def draw_space(
    rng: np.random.Generator,
    rows: StateRows,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Space:
    """Groups and heads, and the sizes of states and of heads; steps of models, from hardly any to long ones.

    Tokens in no row are NaN.
    """
    tokens, width = int(rows.spans[-1, 1]) + int(rng.integers(0, 3)), heads[1] * sizes[1] + 2 * heads[0] * sizes[0]
    mixed = torch.randn(tokens, width) * float(10.0 ** rng.uniform(-1, 0.5))
    mixed[~is_in(rows, tokens)] = torch.nan
    steps = torch.randn(tokens, heads[1]) * 3
    a_log, dt_bias = torch.empty(heads[1]).uniform_(0.01, 16).log(), torch.randn(heads[1]) * 4 - 4
    inputs = (each.to(device, dtype) for each in (mixed, steps, a_log, dt_bias, torch.randn(heads[1])))
    state = poison(torch.randn(SLOTS, heads[1], *sizes) * 0.3, rows)
    return Space(*inputs, state.to(device))
