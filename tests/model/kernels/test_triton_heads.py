"""Norms of heads, rotation and the write into the cache, in one pass, against the two steps of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF
from tokenmill.model.kernels.heads import HeadNorms, RotaryTables, StepAngles
from tokenmill.model.kernels.torch_heads import split_heads
from tokenmill.model.kernels.triton.heads import place_heads


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_equals_the_reference_and_writes_nowhere_else(
    rng: np.random.Generator, dtype: torch.dtype, has_norms: bool
) -> None:
    for _ in range(3):
        kv_heads, group, half = int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.choice([1, 3, 8, 20]))
        tokens, num_heads, head_dim = int(rng.integers(1, 6)), kv_heads * group, 2 * half
        pages, page_size = 5, int(rng.choice([1, 2, 4]))
        angles = torch.randn(50, half)
        rotary = None
        if rng.random() < 0.7:
            rotary = RotaryTables(angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE))
        weights, are_offsets = torch.randn(2, head_dim).to(dtype).to(DEVICE), bool(rng.random() < 0.5)
        norms = HeadNorms(*weights, 1e-5, are_offsets) if has_norms else None
        positions = torch.from_numpy(rng.integers(0, 50, tokens)).to(DEVICE)
        slots = torch.from_numpy(rng.permutation(pages * page_size)[:tokens]).to(DEVICE)
        tokens = len(slots)
        positions = positions[:tokens]
        qkv = torch.randn(tokens, (num_heads + 2 * kv_heads) * head_dim).to(dtype).to(DEVICE)
        memory = [
            torch.full((pages, page_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE) for _ in "kv"
        ]

        q, k, v = split_heads(qkv.clone(), (num_heads, kv_heads), norms, StepAngles(positions).angles_of(rotary))
        expected = [part.clone() for part in memory]
        for part, values in zip(expected, (k, v), strict=True):
            part.view(-1, kv_heads, head_dim)[slots] = values
        got = place_heads(qkv, norms, rotary, (positions, slots), (memory[0], memory[1]))
        # The reference rounds between its steps, the kernel once: two steps of the type.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(got, q, rtol=tolerance, atol=4 * tolerance)
        for part, want in zip(memory, expected, strict=True):
            torch.testing.assert_close(part, want, rtol=tolerance, atol=4 * tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_values_are_normed_and_what_reads_anothers_kv_writes_nothing(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, tokens = 4, 2, 12, 3
    norms = HeadNorms(*torch.randn(2, head_dim).to(dtype).to(DEVICE), 1e-5, v=torch.ones(head_dim).to(dtype).to(DEVICE))
    positions = slots = torch.arange(tokens, device=DEVICE)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype).to(DEVICE)
    memory = torch.zeros(2, 1, 4, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    q, k, v = split_heads(qkv.clone(), (heads, kv_heads), norms, None)
    alone = qkv[:, : heads * head_dim].clone()
    for own, reads_only in ((qkv, False), (alone, True)):
        got = place_heads(own, norms, None, (positions, slots), (memory[0], memory[1]), reads_only)
        torch.testing.assert_close(got, q, rtol=2**-6, atol=2**-4)
        torch.testing.assert_close(memory[0, 0, :tokens], k, rtol=2**-6, atol=2**-4)
        torch.testing.assert_close(memory[1, 0, :tokens], v, rtol=2**-6, atol=2**-4)
        assert not memory[:, 0, tokens:].any()
