"""Products of few rows against torch, on sizes that fill no tile, with a gate and without, in eight-bit floats too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF
from tokenmill.model.kernels import torch_kernels
from tokenmill.model.kernels.fp8 import FP8, quantize_rows
from tokenmill.model.kernels.protocol import Gate
from tokenmill.model.kernels.triton.few_rows import few_rows

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("is_fp8", "gate"), [*((False, gate) for gate in (None, *Gate)), (True, None), (True, Gate.SILU)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_product_of_few_rows_equals_torch(
    rng: np.random.Generator, dtype: torch.dtype, is_fp8: bool, gate: Gate | None
) -> None:
    for tokens in (0, 1, int(rng.integers(2, 17)), int(rng.integers(17, 80))):
        depth, size = (int(number) for number in rng.integers(1, 200, 2))
        size = 1 if tokens == 1 else size
        rows = size if gate is None else 2 * size
        x, weight = drawn(tokens, depth, dtype=dtype), drawn(rows, depth, dtype=dtype, scale=depth**-0.5)
        bias = drawn(rows, dtype=dtype) if rng.random() < 0.5 else None
        scales, exact = None, weight.float()
        if is_fp8:
            weight, scales = quantize_rows(weight)
            exact = weight.float() * scales
        want = torch.nn.functional.linear(x.float(), exact, None if bias is None else bias.float())
        want = want if gate is None else torch_kernels.gated(want, gate)
        got = few_rows(x, weight, bias, gate, scales)
        assert got.dtype == dtype and got.shape == (tokens, size)
        # Its own error, and that of what is rounded before the gate and multiplied there.
        near = TOLERANCES[dtype]
        torch.testing.assert_close(got.float(), want, rtol=near, atol=near)


def test_what_lies_behind_the_rows_and_the_weight_is_not_read(rng: np.random.Generator) -> None:
    tokens, size, depth = int(rng.integers(1, 16)), int(rng.integers(1, 100)), int(rng.integers(1, 100))
    memory = torch.full((2 * size + 64, depth), torch.nan, device=DEVICE)
    memory[: 2 * size] = torch.randn(2 * size, depth)
    inputs = torch.full((64, depth), torch.nan, device=DEVICE)
    inputs[:tokens] = torch.randn(tokens, depth)
    for gate in (None, Gate.SILU):
        assert few_rows(inputs[:tokens], memory[: 2 * size], None, gate).isfinite().all()


def test_every_eight_bit_float_is_itself() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[numbers.float().isfinite()].to(DEVICE)
    weight = torch.zeros(len(numbers), 32, dtype=FP8, device=DEVICE)
    weight[:, 7] = numbers
    x = torch.zeros(2, 32, dtype=HALF, device=DEVICE)
    x[1, 7] = 1.0
    got = few_rows(x, weight, None, None, torch.ones(len(numbers), device=DEVICE))
    assert torch.equal(got[1].float(), numbers.float())
    assert not got[0].any()
