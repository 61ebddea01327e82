"""The native norms and draws against their torch references, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tokenmill.model.kernels import native_ops, torch_kernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import Activation, Gate, SigmoidScores, WeightRole


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Count the bfloat16 numbers between two, plus 1; 0 where they are the same."""
    ordered = [torch.where(bits < 0, -(bits & 0x7FFF), bits) for bits in (x.view(torch.int16).int() for x in (a, b))]
    return (ordered[0] - ordered[1]).abs()


@every_isa
def test_a_norm_is_that_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(10):
        count, size = int(rng.integers(1, 40)), int(rng.choice([1, 7, 16, 40, 128, 1000, 1024, 4100]))
        memory = drawn(count, size + int(rng.integers(0, 9))) * float(10.0 ** rng.uniform(-3, 3))
        x, weight, eps = memory[:, :size], drawn(size), float(10.0 ** rng.uniform(-7, -4))
        is_offset = bool(rng.random() < 0.5)
        got = native_ops.rms_norm(kernels(isa), x, weight, eps, is_offset=is_offset)
        want = torch_kernels.rms_norm(x, weight, eps, is_offset)
        apart = steps_apart(got, want)
        # A sum in another order can turn both roundings; it hardly ever does.
        assert apart.max() <= 2
        assert (apart > 0).float().mean() < 0.02 or apart.count_nonzero() <= 2


@every_isa
def test_an_update_is_added_in_place_first(isa: str, rng: np.random.Generator) -> None:
    for _ in range(6):
        count, size = int(rng.integers(1, 40)), int(rng.choice([5, 16, 72, 1024]))
        x, delta, weight = drawn(count, size), drawn(count, size + 3)[:, 1 : size + 1], drawn(size)
        scale = 1.0 if rng.random() < 0.5 else float(np.float32(rng.uniform(0.1, 3)))
        want_x = (x.float() + scale * delta.float()).bfloat16()
        got = native_ops.rms_norm(kernels(isa), x, weight, 1e-6, delta, scale)
        assert torch.equal(x, want_x)
        assert torch.equal(got, native_ops.rms_norm(kernels(isa), want_x, weight, 1e-6))


@every_isa
def test_a_row_is_the_same_in_any_company_and_on_any_threads(isa: str, rng: np.random.Generator) -> None:
    x, weight = drawn(300, 1024), drawn(1024)
    together = native_ops.rms_norm(kernels(isa, 3), x, weight, 1e-6)
    for row in rng.integers(0, 300, 5).tolist():
        assert torch.equal(native_ops.rms_norm(kernels(isa), x[row : row + 1], weight, 1e-6)[0], together[row])


@every_isa
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_breaks_alone(isa: str, value: float, rng: np.random.Generator) -> None:
    x, weight = drawn(5, 100), drawn(100)
    clean = native_ops.rms_norm(kernels(isa), x, weight, 1e-6)
    x[2, int(rng.integers(100))] = value
    got = native_ops.rms_norm(kernels(isa), x, weight, 1e-6)
    assert got[2].isnan().any()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])


@every_isa
def test_a_layer_norm_is_that_of_torch_but_for_last_bits(isa: str, rng: np.random.Generator) -> None:
    for _ in range(10):
        count, size = int(rng.integers(1, 40)), int(rng.choice([1, 7, 16, 40, 128, 1000, 1024, 4100]))
        x = drawn(count, size) + float(rng.uniform(-2, 2))
        weight, bias, delta = drawn(size), drawn(size), drawn(count, size) if rng.random() < 0.5 else None
        want_x = x if delta is None else (x.float() + delta.float()).bfloat16()
        want = torch.nn.functional.layer_norm(want_x.float(), (size,), weight.float(), bias.float(), 1e-6)
        got = native_ops.layer_norm(kernels(isa, 2), x, weight, bias, 1e-6, delta)
        assert torch.equal(x, want_x)
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-3 if size > 1 else 1.0)


@every_isa
@pytest.mark.parametrize("activation", Activation)
def test_activations_are_those_of_torch_but_for_the_last_bit(
    isa: str, activation: Activation, rng: np.random.Generator
) -> None:
    x = drawn(int(rng.integers(1, 30)), int(rng.integers(1, 3000))) * float(rng.choice([0.1, 1, 5]))
    want = torch_kernels.activated(x.double(), activation)
    got = native_ops.activate(kernels(isa, 2), x.clone(), activation)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6 if activation is Activation.GELU else 1e-15)
    extremes = torch.tensor([float("nan"), 100.0, -100.0, 0.0]).bfloat16()
    got = native_ops.activate(kernels(isa), extremes, activation)
    assert got[0].isnan()
    assert got[1:].tolist() == pytest.approx([9984.0 if activation is Activation.RELU2 else 100.0, 0.0, 0.0], abs=1e-30)


@every_isa
@pytest.mark.parametrize("gate", Gate)
def test_gates_are_those_of_torch_but_for_the_last_bits(isa: str, gate: Gate, rng: np.random.Generator) -> None:
    size, native = int(rng.integers(1, 60)), kernels(isa)
    weight = PackedWeight(native, (2 * size, 32), WeightRole.GATE_UP)
    rows = drawn(2 * size, 32)
    weight.load_rows(0, rows)
    x = drawn(9, 32)
    want = torch_kernels.gated(x.double() @ rows.double().T, gate)
    torch.testing.assert_close(weight.gated(x, None, gate).double(), want, rtol=2**-6, atol=1e-2)


@every_isa
def test_experts_are_chosen_as_torch_does(isa: str, rng: np.random.Generator) -> None:
    plain = torch_kernels.TorchKernels("bfloat16", "cpu")
    for experts, count in ((2, 1), (5, 5), (16, 4), (37, 6), (128, 8), (512, 10)):
        for normalizes in (False, True):
            # Whole steps apart, so that torch has one order too.
            steps = torch.stack([torch.randperm(experts) for _ in range(70)]).float()
            logits = ((steps - experts / 2) / 8).bfloat16()
            weights, ids = native_ops.route(kernels(isa, 2), logits, count, normalizes)
            want, wanted = plain.route(logits, count, normalizes)
            assert torch.equal(ids, wanted)
            assert steps_apart(weights, want).max() <= 1
            assert (weights != want).float().mean() < 0.02


@every_isa
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_are_chosen_by_sigmoids_as_torch_does(isa: str, has_bias: bool, rng: np.random.Generator) -> None:
    plain = torch_kernels.TorchKernels("bfloat16", "cpu")
    for experts, count in ((2, 1), (5, 5), (32, 4), (37, 6)):
        scores = SigmoidScores(torch.randn(experts) * 0.3 if has_bias else None, float(rng.uniform(0.5, 3)))
        for normalizes in (False, True):
            steps = torch.stack([torch.randperm(experts) for _ in range(70)]).float()
            logits = ((steps - experts / 2) / 8).bfloat16()
            weights, ids = native_ops.route(kernels(isa, 2), logits, count, normalizes, scores)
            want, wanted = plain.route(logits, count, normalizes, scores)
            assert torch.equal(ids, wanted)
            assert steps_apart(weights, want).max() <= 1
            assert (weights != want).float().mean() < 0.02


@every_isa
def test_of_equal_logits_the_first_expert_is_chosen_in_any_company(isa: str, rng: np.random.Generator) -> None:
    logits = torch.randn(90, 40).mul(2).round().bfloat16()
    weights, ids = native_ops.route(kernels(isa, 3), logits, 7, True)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices
    assert torch.equal(ids, order[:, :7])
    shares = logits.double().softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights.double(), shares / shares.sum(-1, keepdim=True), rtol=2**-7, atol=0)
    for row in rng.integers(0, 90, 5).tolist():
        alone = native_ops.route(kernels(isa), logits[row : row + 1], 7, True)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])


@every_isa
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.nan])
def test_a_router_that_gives_no_number_breaks_its_token_alone(isa: str, value: float) -> None:
    logits = drawn(5, 20)
    logits[2, 13] = value
    for normalizes in (False, True):
        weights, ids = native_ops.route(kernels(isa), logits, 3, normalizes)
        assert weights[2].isnan().all()
        assert weights[[0, 1, 3, 4]].isfinite().all()
        assert ((ids >= 0) & (ids < 20)).all()


@every_isa
def test_sums_and_products_are_rounded_as_torch_rounds_them(isa: str, rng: np.random.Generator) -> None:
    plain, own = torch_kernels.TorchKernels("bfloat16", "cpu"), kernels(isa, 2)
    for count, size in ((1, 1), (3, 40), (70, 1000)):
        x, delta, gate = drawn(count, size), drawn(count, size), drawn(count, 1)
        scale, factor = float(rng.uniform(0.1, 30)), float(rng.uniform(0.1, 2))
        for added in (None, delta):
            want = plain.scaled_sum(x.clone(), factor, None if added is None else added.clone(), scale)
            assert torch.equal(native_ops.scaled_sum(own, x.clone(), factor, added, scale), want)
        wide = drawn(count, size + 5)[:, 2 : size + 2]
        assert torch.equal(native_ops.multiply(own, wide, delta), wide * delta)
        want = plain.add_gated(delta.clone(), x.clone(), gate)
        got = native_ops.add_gated(own, delta.clone(), x, gate)
        assert steps_apart(got, want).max() <= 2
        assert (got != want).float().mean() < 0.02 or (got != want).count_nonzero() <= 2
