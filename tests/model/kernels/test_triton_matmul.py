"""Grouped and whole products against torch, on sizes that fill no tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, same
from tokenmill.model.kernels.triton import matmul
from tokenmill.model.kernels.triton.experts import numbers_of


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_whole_product_equals_torch(rng: np.random.Generator, dtype: torch.dtype) -> None:
    for _ in range(4):
        tokens, depth, columns = (int(size) for size in rng.integers(1, 150, 3))
        x = torch.randn(tokens, depth).to(dtype).to(DEVICE)
        weight = (torch.randn(columns, depth) / depth**0.5).to(dtype).to(DEVICE)
        bias = torch.randn(columns).to(dtype).to(DEVICE) if rng.random() < 0.5 else None
        want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(matmul.multiply(x, weight, bias).double(), want, rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_alone_and_in_company(rng: np.random.Generator) -> None:
    x, weight = torch.randn(70, 40, device=DEVICE), torch.randn(30, 40, device=DEVICE)
    together = matmul.multiply(x, weight)
    for row in rng.integers(0, 70, 3).tolist():
        assert same(matmul.multiply(x[row : row + 1], weight)[0], together[row])


def test_groups_take_their_own_weight_whatever_their_sizes(rng: np.random.Generator) -> None:
    for _ in range(4):
        num_groups, depth, columns, tokens = int(rng.integers(1, 6)), 20, int(rng.integers(1, 140)), 9
        counts = rng.choice([0, 1, 3, 63, 64, 65] if rng.random() < 0.5 else [0, 1], num_groups)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        x = torch.randn(tokens, depth, device=DEVICE)
        weights = torch.randn(num_groups, columns, depth, device=DEVICE)
        sources = torch.from_numpy(rng.integers(0, tokens, starts[-1])).to(DEVICE)
        group_of_row = np.repeat(np.arange(num_groups), counts)
        of_rows = torch.from_numpy(group_of_row.astype(np.int32)).to(DEVICE)
        groups = matmul.Groups(torch.from_numpy(starts).to(DEVICE), of_rows, sources)
        got = matmul.grouped_multiply(x, weights, groups)
        want = torch.einsum("pd,pcd->pc", x[sources], weights[torch.from_numpy(group_of_row).to(DEVICE)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_groups_of_matrices_in_mxfp4_give_the_products_of_their_numbers(rng: np.random.Generator) -> None:
    for dtype in (torch.float32, HALF):
        num_groups, depth, columns, tokens = 3, 32 * int(rng.integers(1, 6)), int(rng.integers(1, 140)), 9
        counts = rng.choice([0, 1, 3, 65], num_groups)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        blocks = torch.from_numpy(rng.integers(0, 256, (num_groups, columns, depth // 32, 16), dtype=np.uint8))
        exponents = torch.from_numpy(rng.integers(118, 127, (num_groups, columns, depth // 32), dtype=np.uint8))
        exponents[0, 0] = 0
        weights = torch.stack([numbers_of(one[0].flatten(1), one[1]) for one in zip(blocks, exponents, strict=True)])
        x = torch.randn(tokens, depth).to(dtype).to(DEVICE)
        sources = torch.from_numpy(rng.integers(0, tokens, starts[-1])).to(DEVICE)
        of_rows = torch.from_numpy(np.repeat(np.arange(num_groups, dtype=np.int32), counts)).to(DEVICE)
        groups = matmul.Groups(torch.from_numpy(starts).to(DEVICE), of_rows, sources)
        got = matmul.grouped_multiply(x, blocks.flatten(2).to(DEVICE), groups, exponents.to(DEVICE))
        want = matmul.grouped_multiply(x, weights.to(dtype).to(DEVICE), groups)
        assert same(got, want), "the numbers are exact in any type, and the sums the same"
