"""The native kernels of layers with states against their torch references, on every instruction set of this machine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels import native
from tests.model.kernels.native import BEST, ISAS, every_isa
from tests.model.kernels.states import Conv, Delta, Space, cut, draw_conv, draw_delta, draw_space, draw_step, step_of
from tokenmill.model.kernels import recurrence
from tokenmill.model.kernels.native_recurrence import NativeRecurrence

HALF_STEP = 2**-8


def kernels(isa: str, threads: int = 1) -> NativeRecurrence:
    return NativeRecurrence(native.kernels(isa, threads))


def draw_sizes(rng: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and sizes: those of models, and odd multiples of a vector."""
    key_heads = int(rng.integers(1, 4))
    heads = key_heads, key_heads * int(rng.integers(1, 4))
    return heads, (int(rng.choice([16, 48, 64, 128, 256])), int(rng.choice([16, 48, 64, 80, 128, 256])))


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, NaN too."""
    assert got.dtype == want.dtype
    kind = torch.int32 if got.dtype == torch.float32 else torch.int16
    return torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


@every_isa
def test_a_convolution_is_that_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(20):
        rows = draw_step(rng, 20)
        conv = draw_conv(rng, rows, int(rng.choice([1, 7, 16, 31, 32, 40, 100, 260, 600])), int(rng.integers(2, 9)))
        own = conv.copy()
        want = conv.run(recurrence.short_conv, rows)
        got = own.run(kernels(isa, int(rng.integers(1, 4))).short_conv, rows)
        torch.testing.assert_close(got, want, rtol=2 * HALF_STEP, atol=1e-4)
        assert same_numbers(own.state, conv.state), "inputs are kept as they are, and other slots are not touched"


@every_isa
def test_the_delta_rule_is_that_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(12):
        rows = draw_step(rng, 40)
        delta = draw_delta(rng, rows, *draw_sizes(rng))
        own = delta.copy()
        want = delta.run(recurrence.delta_rule, rows)
        got = own.run(kernels(isa, int(rng.integers(1, 4))).delta_rule, rows)
        # A sum of large numbers that nearly cancel is as exact as these are.
        torch.testing.assert_close(got, want, rtol=2 * HALF_STEP, atol=1e-5 * float(want.abs().max()) + 1e-6)
        largest = float(delta.state[rows.slots].abs().max())
        torch.testing.assert_close(own.state, delta.state, rtol=1e-4, atol=2e-6 * largest, equal_nan=True)


@every_isa
def test_a_state_space_is_that_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(12):
        rows = draw_step(rng, 40)
        space = draw_space(rng, rows, *draw_sizes(rng))
        own = space.copy()
        want = space.run(recurrence.state_space, rows)
        got = own.run(kernels(isa, int(rng.integers(1, 4))).state_space, rows)
        torch.testing.assert_close(got, want, rtol=2 * HALF_STEP, atol=1e-5 * float(want.abs().max()) + 1e-6)
        largest = float(space.state[rows.slots].abs().max())
        torch.testing.assert_close(own.state, space.state, rtol=1e-4, atol=2e-6 * largest, equal_nan=True)


def run_conv(conv: Conv, rows: recurrence.StateRows, isa: str, threads: int = 1) -> torch.Tensor:
    return conv.run(kernels(isa, threads).short_conv, rows)


def run_delta(delta: Delta, rows: recurrence.StateRows, isa: str, threads: int = 1) -> torch.Tensor:
    return delta.run(kernels(isa, threads).delta_rule, rows)


def run_space(space: Space, rows: recurrence.StateRows, isa: str, threads: int = 1) -> torch.Tensor:
    return space.run(kernels(isa, threads).state_space, rows)


def draw_case(rng: np.random.Generator, kind: str, rows: recurrence.StateRows):
    if kind == "conv":
        return draw_conv(rng, rows, int(rng.choice([30, 64, 1000])), int(rng.integers(2, 5))), run_conv
    if kind == "space":
        return draw_space(rng, rows, *draw_sizes(rng)), run_space
    return draw_delta(rng, rows, *draw_sizes(rng)), run_delta


@every_isa
@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_drafts_have_the_same_outputs_and_change_no_state(isa: str, kind: str, rng: np.random.Generator) -> None:
    for _ in range(6):
        rows = draw_step(rng, 40)
        case, run = draw_case(rng, kind, rows)
        drafts, before, threads = msgspec.structs.replace(rows, keeps=False), case.copy(), int(rng.integers(1, 4))
        drafted = run(case, drafts, isa, threads)
        assert same_numbers(case.state, before.state)
        assert same_numbers(drafted, run(case, rows, isa, threads))
        assert not same_numbers(case.state, before.state)


@every_isa
@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_bits_do_not_depend_on_how_tokens_are_cut_into_steps(isa: str, kind: str, rng: np.random.Generator) -> None:
    for _ in range(4):
        rows = draw_step(rng, 40)
        case, run = draw_case(rng, kind, rows)
        before, whole = case.state.clone(), run(case, rows, isa)
        for tokens, step in cut(rows, rng):
            assert same_numbers(run(case.of(tokens, before), step, isa), whole[tokens])
        assert same_numbers(before, case.state)


@every_isa
@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_bits_depend_neither_on_company_nor_on_threads(isa: str, kind: str, rng: np.random.Generator) -> None:
    for _ in range(4):
        rows = draw_step(rng, 40)
        case, run = draw_case(rng, kind, rows)
        alone, threaded = case.copy(), case.copy()
        whole = run(case, rows, isa)
        assert same_numbers(run(threaded, rows, isa, int(rng.integers(2, 9))), whole)
        assert same_numbers(threaded.state, case.state)
        for number, (start, end) in enumerate(rows.spans.tolist()):
            own = step_of([int(rows.slots[number])], [end - start])
            assert same_numbers(run(case.of(torch.arange(start, end), alone.state), own, isa), whole[start:end])
        assert same_numbers(alone.state, case.state)


@pytest.mark.parametrize("kind", ["conv", "delta", "space"])
def test_bits_do_not_depend_on_the_level(kind: str, rng: np.random.Generator) -> None:
    for _ in range(4):
        rows = draw_step(rng, 40)
        case, run = draw_case(rng, kind, rows)
        cases = [case.copy() for _ in ISAS]
        results = [run(own, rows, isa) for own, isa in zip(cases, ISAS, strict=True)]
        for own, result in zip(cases, results, strict=True):
            assert same_numbers(result, results[0])
            assert same_numbers(own.state, cases[0].state)


@pytest.mark.parametrize("isa", BEST)
def test_a_broken_request_breaks_alone(isa: str, rng: np.random.Generator) -> None:
    rows = step_of([4, 0, 7], [3, 20, 1])
    delta = draw_delta(rng, rows, (2, 4), (64, 64))
    clean, broken = delta.copy(), delta.copy()
    broken.mixed[int(rng.integers(3, 23))] = torch.nan
    got, want = run_delta(broken, rows, isa), run_delta(clean, rows, isa)
    assert got[3:23].isnan().any()
    assert same_numbers(got[[0, 1, 2, 23]], want[[0, 1, 2, 23]])
    assert same_numbers(broken.state[[4, 7]], clean.state[[4, 7]])


@pytest.mark.parametrize("isa", BEST)
def test_states_may_be_parts_of_a_wider_memory(isa: str, rng: np.random.Generator) -> None:
    rows = draw_step(rng, 9)
    delta = draw_delta(rng, rows, (1, 2), (32, 48))
    wide = torch.full((*delta.state.shape[:1], 3, *delta.state.shape[1:]), torch.nan)
    wide[:, 1] = delta.state
    own = delta.copy().of(torch.arange(len(delta.mixed)), wide[:, 1])
    assert same_numbers(run_delta(own, rows, isa), run_delta(delta, rows, isa))
    assert same_numbers(wide[:, 1], delta.state)
    assert wide[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("isa", BEST)
def test_sizes_without_a_kernel_are_refused(isa: str, rng: np.random.Generator) -> None:
    rows = step_of([0], [2])
    for sizes in [(24, 64), (64, 24), (272, 64), (64, 272)]:
        with pytest.raises(ValueError, match="a multiple of 16 numbers, at most 256"):
            run_delta(draw_delta(rng, rows, (1, 1), sizes), rows, isa)
        with pytest.raises(ValueError, match="a multiple of 16 numbers, at most 256"):
            run_space(draw_space(rng, rows, (1, 1), sizes), rows, isa)
    with pytest.raises(ValueError, match="2 to 8 tokens"):
        run_conv(draw_conv(rng, rows, 16, 9), rows, isa)


@every_isa
def test_gates_are_those_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(10):
        count, heads = int(rng.integers(1, 70)), int(rng.integers(1, 9))
        size, threads = int(rng.choice([1, 7, 16, 64, 100, 128, 256])), int(rng.integers(1, 4))
        wide = torch.randn(count, 2 * heads * size).bfloat16() * float(10.0 ** rng.uniform(-1, 1))
        x, gate = wide.chunk(2, -1)
        weight, eps = torch.randn(size).bfloat16(), float(10.0 ** rng.uniform(-7, -4))
        got = kernels(isa, threads).gated_rms_norm(x, gate, weight, eps)
        want = recurrence.gated_rms_norm(x.contiguous(), gate, weight, eps)
        torch.testing.assert_close(got, want, rtol=6 * HALF_STEP, atol=1e-6)
        got, want = kernels(isa, threads).sigmoid_gate(x, gate), recurrence.sigmoid_gate(x, gate)
        torch.testing.assert_close(got, want, rtol=4 * HALF_STEP, atol=1e-6)
        assert (got != want).float().mean() < 0.01 if count > 4 else True


@every_isa
def test_norms_of_gated_groups_are_those_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(10):
        count, groups = int(rng.integers(1, 70)), int(rng.integers(1, 5))
        size, threads = int(rng.choice([1, 7, 16, 100, 256, 1000])), int(rng.integers(1, 4))
        wide = torch.randn(count, 2 * groups * size).bfloat16() * float(10.0 ** rng.uniform(-1, 1))
        x, gate = wide.chunk(2, -1)
        weight, eps = torch.randn(groups * size).bfloat16(), float(10.0 ** rng.uniform(-7, -4))
        got = kernels(isa, threads).gated_group_norm(x, gate, weight, groups, eps)
        want = recurrence.gated_group_norm(x, gate, weight, groups, eps)
        torch.testing.assert_close(got, want, rtol=4 * HALF_STEP, atol=1e-6)


@every_isa
def test_gates_of_extremes_are_those_of_torch(isa: str) -> None:
    gate = torch.tensor([[-3e38, -100.0, -88.0, 0.0, 100.0, 3e38, torch.inf, -torch.inf, torch.nan]]).bfloat16()
    got = kernels(isa).sigmoid_gate(torch.ones_like(gate), gate)
    want = recurrence.sigmoid_gate(torch.ones_like(gate), gate)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-30, equal_nan=True)
