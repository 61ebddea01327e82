"""Errors of rounding, which cost what they cost: weighed, and fed back, against least squares and a plain loop."""

from __future__ import annotations

import numpy as np
import torch

from tests.model.kernels.native import every_isa, kernels
from tests.model.kernels.test_native_linear import INTEGERS, quantized
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.stored_tensors import floats, stored
from tokenmill.model.quantization.error_costs import DAMPING, SPAN, ErrorCosts, feedback_of
from tokenmill.model.quantization.packed import PackedFormat, WeightedRows

GROUP = 32
ENDS = {8: (-127, 127), 4: (0, 15), 5: (0, 31)}


def inputs_that_go_together(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, 24) @ torch.randn(24, size) + 0.3 * torch.randn(count, size)


def rounded_in_turn(
    weight: torch.Tensor, format: PackedFormat, importance: torch.Tensor, feedback: torch.Tensor
) -> torch.Tensor:
    """The numbers that are stored, each found after those before it."""
    numbers, found = weight.clone(), torch.zeros_like(weight)
    for start in range(0, weight.shape[1], GROUP):
        stop = min(start + GROUP, weight.shape[1])
        rows = quantized(numbers[:, start:stop], format, importance[start:stop])
        scale = torch.from_numpy(rows.scales)[:, 0]
        offset = torch.zeros_like(scale) if rows.offsets is None else torch.from_numpy(rows.offsets)[:, 0]
        low, high = ENDS[rows.bits]
        end = min(weight.shape[1], start // SPAN * SPAN + SPAN)
        for place in range(start, stop):
            factor = torch.where(scale == 0, 0, 1 / scale)
            if format in (PackedFormat.INT4, PackedFormat.INT5):  # what stands for 0 is an integer
                zero = (high + 1) // 2
                integer = (numbers[:, place] * factor).clamp(-zero, zero - 1).round()
                stands = (integer.double() * scale).float()
            else:
                integer = ((numbers[:, place] - offset) * factor).clamp(low, high).round()
                stands = (integer.double() * scale + offset).float()
            found[:, place], error = stands, numbers[:, place] - stands
            shares = feedback[place // SPAN, place % SPAN, : end - start // SPAN * SPAN]
            later = slice(start // SPAN * SPAN, end)
            numbers[:, later] = (numbers[:, later].double() - error.double()[:, None] * shares).float()
    return found


def test_shares_are_those_of_least_squares(rng: np.random.Generator) -> None:
    inputs = inputs_that_go_together(300, SPAN + 40).double()
    found = feedback_of(inputs.float().numpy())
    assert found.shape == (2, SPAN, SPAN)
    sums = inputs.float().double().T @ inputs.float().double()
    for first, last in ((0, SPAN), (SPAN, SPAN + 40)):
        own = sums[first:last, first:last].clone()
        own += DAMPING * own.diagonal().sum() / SPAN * torch.eye(last - first)
        for place in (0, 7, last - first - 2):
            rest = slice(place + 1, None)
            # The change of later weights that leaves least of the error's outputs.
            wanted = -torch.linalg.solve(own[rest, rest], own[rest, place])
            shares = torch.from_numpy(found[first // SPAN, place]).double()
            torch.testing.assert_close(shares[place + 1 : last - first], wanted, rtol=1e-3, atol=1e-4)
            assert not shares[: place + 1].any() and not shares[last - first :].any()


@every_isa
def test_errors_count_as_much_as_their_inputs_weigh(isa: str, rng: np.random.Generator) -> None:
    for in_size in (1, 31, 64, 200):
        weight, importance = torch.randn(37, in_size), torch.randn(in_size).mul(2).exp()
        for format in INTEGERS:
            matrix = PackedWeight(kernels(isa), (37, in_size), format=format)
            matrix.load_rows(0, WeightedRows(stored(weight), ErrorCosts(importance.numpy())))
            wanted = floats(quantized(weight, format, importance))[:, :in_size]
            assert torch.equal(matrix.lookup(torch.arange(37)), wanted.bfloat16())
            plain = floats(quantized(weight, format))[:, :in_size]
            losses = [(importance * (rounded - weight) ** 2).sum() for rounded in (wanted, plain)]
            assert in_size < 60 or losses[0] < losses[1]


@every_isa
def test_each_number_is_rounded_after_those_before_it(isa: str, rng: np.random.Generator) -> None:
    for in_size in (40, 200, 2 * SPAN):
        weight, importance = torch.randn(19, in_size), torch.randn(in_size).exp()
        feedback = feedback_of(inputs_that_go_together(400, in_size).numpy())
        for format in INTEGERS:
            matrix = PackedWeight(kernels(isa), (19, in_size), format=format)
            matrix.load_rows(0, WeightedRows(stored(weight), ErrorCosts(importance.numpy(), feedback)))
            found = matrix.lookup(torch.arange(19))
            wanted = rounded_in_turn(weight, format, importance, torch.from_numpy(feedback))
            assert torch.equal(found, wanted.bfloat16()), (format, in_size)


@every_isa
def test_outputs_lose_less(isa: str, rng: np.random.Generator) -> None:
    inputs, weight = inputs_that_go_together(1000, 256), torch.randn(64, 256)
    importance, feedback = inputs.square().mean(0), feedback_of(inputs.numpy())
    for format in INTEGERS:
        losses = []
        for costs in (ErrorCosts(importance.numpy()), ErrorCosts(importance.numpy(), feedback)):
            matrix = PackedWeight(kernels(isa), (64, 256), format=format)
            matrix.load_rows(0, WeightedRows(stored(weight), costs))
            # Products with unit vectors would round inputs; rows are bfloat16, which only int8's errors notice.
            losses.append(((matrix.lookup(torch.arange(64)).float() - weight) @ inputs.T).square().sum())
        assert losses[1] < (1.0 if format is PackedFormat.INT8 else 0.8) * losses[0], format


def test_parts_of_inputs_keep_whole_spans_alone() -> None:
    costs = ErrorCosts(
        np.ones(3 * SPAN, np.float32), np.arange(3 * SPAN * SPAN, dtype=np.float32).reshape(3, SPAN, SPAN)
    )
    whole, torn = costs.of_inputs(SPAN, 3 * SPAN), costs.of_inputs(SPAN, 3 * SPAN - 8)
    assert whole.feedback is not None and np.array_equal(whole.feedback, costs.feedback[1:])
    assert torn.feedback is None and torn.importance is not None and len(torn.importance) == 2 * SPAN - 8
