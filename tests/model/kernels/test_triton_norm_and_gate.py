"""The small Triton kernels against their torch references, rows of odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.model.kernels.gpu import DEVICE, HALF
from tokenmill.model.kernels import torch_kernels
from tokenmill.model.kernels.protocol import Gate
from tokenmill.model.kernels.triton import gate, norm

DTYPES = [torch.float32, HALF]


def drawn(rng: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * float(rng.uniform(0.1, 10))).to(dtype).to(DEVICE)


def assert_near(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-5) -> None:
    assert got.dtype == want.dtype
    # Both round twice, between their two products and at the end, and each rounding may differ by a step of the type.
    tolerance = 2 * {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm_equals_torch(rng: np.random.Generator, dtype: torch.dtype, adds: bool) -> None:
    for _ in range(4):
        tokens, size = int(rng.integers(0, 4)), int(rng.integers(1, 200))
        x, delta = drawn(rng, tokens, size, dtype=dtype), drawn(rng, tokens, size, dtype=dtype)
        weight, eps = drawn(rng, size, dtype=dtype), float(rng.choice([1e-6, 1e-2]))
        scale = 1.0 if rng.random() < 0.5 else float(rng.uniform(0.1, 3))
        summed = (x.float() + scale * delta.float()).to(dtype) if adds else x.clone()
        is_offset = bool(rng.random() < 0.5)
        want = torch_kernels.rms_norm(summed, weight, eps, is_offset)
        if adds:
            got = norm.add_rms_norm(x, delta, weight, eps, scale, is_offset)
        else:
            got = norm.rms_norm(x, weight, eps, is_offset)
        assert_near(got, want)
        if scale == 1:
            assert torch.equal(x, summed), "the residual stream is what was added, rounded once"
        else:
            assert_near(x, summed)


@pytest.mark.parametrize("kind", Gate)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_product_equals_torch(rng: np.random.Generator, dtype: torch.dtype, kind: Gate) -> None:
    for size in (1, 7, 130, 1500):
        gate_up = drawn(rng, int(rng.integers(0, 4)), 2 * size, dtype=dtype)
        # Where a gate is nearly shut, 1 + erf(x) is what is left of two numbers near 1, times x of up to 6, times up.
        lost = 4 * torch.finfo(torch.float32).eps * 6 * float(gate_up[:, size:].abs().max()) if len(gate_up) else 0.0
        assert_near(gate.gated(gate_up, kind), torch_kernels.gated(gate_up.clone(), kind), 1e-5 + lost)


@pytest.mark.parametrize("kind", Gate)
def test_a_gated_product_of_extremes_is_what_torch_gives(kind: Gate) -> None:
    gate_up = torch.tensor([[-1e30, 1e12, 0.0, -200.0, 2.0, 3.0, 4.0, 5.0]], device=DEVICE)
    assert_near(gate.gated(gate_up, kind), torch_kernels.gated(gate_up.clone(), kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_and_gelu_equal_torch(rng: np.random.Generator, dtype: torch.dtype) -> None:
    for adds in (False, True):
        tokens, size = int(rng.integers(0, 4)), int(rng.integers(2, 200))
        x, delta = drawn(rng, tokens, size, dtype=dtype) + 1, drawn(rng, tokens, size, dtype=dtype)
        weight, bias = drawn(rng, size, dtype=dtype), drawn(rng, size, dtype=dtype)
        summed = (x.float() + delta.float()).to(dtype) if adds else x.clone()
        want = functional.layer_norm(summed.float(), (size,), weight.float(), bias.float(), 1e-6).to(dtype)
        got = norm.layer_norm(x, weight, bias, 1e-6, delta if adds else None)
        assert_near(got, want)
        assert torch.equal(x, summed)
    x = drawn(rng, 3, 700, dtype=dtype)
    assert_near(gate.gelu(x.clone()), functional.gelu(x.float(), approximate="tanh").to(dtype))
