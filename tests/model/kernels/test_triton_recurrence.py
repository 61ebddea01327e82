"""The Triton kernels of layers with states against their torch references."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF
from tests.model.kernels.states import cut, draw_conv, draw_delta, draw_space, draw_step
from tokenmill.model.kernels import recurrence
from tokenmill.model.kernels.triton import recurrence as kernels

DTYPES = [torch.float32, HALF]
STEP = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def draw_case(rng: np.random.Generator, kind: str, rows: recurrence.StateRows, dtype: torch.dtype):
    """A case, its kernel and its reference."""
    if kind == "conv":
        case = draw_conv(rng, rows, int(rng.choice([1, 30, 130, 300])), int(rng.integers(2, 6)), dtype, DEVICE)
        return case, kernels.short_conv, recurrence.short_conv
    key_heads = int(rng.integers(1, 3))
    sizes = int(rng.choice([1, 7, 16, 40, 64])), int(rng.choice([1, 7, 16, 40, 64]))
    if kind == "space":
        groups, heads = key_heads, key_heads * int(rng.integers(1, 3))
        return draw_space(rng, rows, (groups, heads), sizes, dtype, DEVICE), kernels.state_space, recurrence.state_space
    case = draw_delta(rng, rows, (key_heads, key_heads * int(rng.integers(1, 3))), sizes, dtype, DEVICE)
    return replace(case, mixed=case.mixed.clamp(-100, 100)), kernels.delta_rule, recurrence.delta_rule


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_it_equals_torch_and_touches_no_other_slot(rng: np.random.Generator, kind: str, dtype: torch.dtype) -> None:
    for _ in range(3):
        rows = draw_step(rng, 40 if kind == "conv" else 8, DEVICE)
        case, kernel, reference = draw_case(rng, kind, rows, dtype)
        own = case.copy()
        want, got = case.run(reference, rows), own.run(kernel, rows)
        torch.testing.assert_close(got, want, rtol=STEP[dtype], atol=1e-5 * max(1.0, float(want.abs().max())))
        tolerance = 0.0 if kind == "conv" else 1e-5 * max(1.0, float(case.state[rows.slots].abs().max()))
        torch.testing.assert_close(own.state, case.state, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_bits_do_not_depend_on_how_tokens_are_cut_into_steps(
    rng: np.random.Generator, kind: str, dtype: torch.dtype
) -> None:
    for _ in range(2):
        rows = draw_step(rng, 20 if kind == "conv" else 6, DEVICE)
        case, kernel, _ = draw_case(rng, kind, rows, dtype)
        before, whole = case.state.clone(), case.run(kernel, rows)
        for tokens, step in cut(rows, rng):
            assert torch.equal(case.of(tokens, before).run(kernel, step), whole[tokens])
        assert torch.equal(before.nan_to_num(7.0), case.state.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_drafts_have_the_same_outputs_and_change_no_state(rng: np.random.Generator, kind: str) -> None:
    for dtype in DTYPES:
        rows = draw_step(rng, 20 if kind == "conv" else 6, DEVICE)
        case, kernel, reference = draw_case(rng, kind, rows, dtype)
        drafts = msgspec.structs.replace(rows, keeps=False)
        for one in (kernel, reference):
            own, before = case.copy(), case.state.clone().nan_to_num(7.0)
            drafted = own.run(one, drafts)
            assert torch.equal(own.state.nan_to_num(7.0), before)
            assert torch.equal(drafted, own.run(one, rows))
            assert not torch.equal(own.state.nan_to_num(7.0), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gates_equal_torch(rng: np.random.Generator, dtype: torch.dtype) -> None:
    for size in (1, 7, 64, 130):
        count, heads = int(rng.integers(1, 4)), int(rng.integers(1, 12))
        x, gate = (torch.randn(count, 2 * heads * size) * 3).to(dtype).to(DEVICE).chunk(2, -1)
        weight = torch.randn(size).to(dtype).to(DEVICE)
        want = recurrence.gated_rms_norm(x.contiguous(), gate, weight, 1e-6)
        got = kernels.gated_rms_norm(x, gate, weight, 1e-6)
        torch.testing.assert_close(got, want, rtol=3 * STEP[dtype], atol=1e-5)
        got, want = kernels.sigmoid_gate(x, gate), recurrence.sigmoid_gate(x, gate)
        torch.testing.assert_close(got, want, rtol=2 * STEP[dtype], atol=1e-5)


def test_gates_of_extremes_are_what_torch_gives() -> None:
    gate = torch.tensor([[-1e30, -200.0, -80.0, 0.0, 80.0, 1e30]], device=DEVICE)
    torch.testing.assert_close(kernels.sigmoid_gate(gate * 0 + 2, gate), recurrence.sigmoid_gate(gate * 0 + 2, gate))
