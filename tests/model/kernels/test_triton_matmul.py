"""Grouped and whole products against torch, on sizes that fill no tile; grouped ones in few bits too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, same
from tokenmill.model.kernels.fp8 import FP8, quantize_rows
from tokenmill.model.kernels.triton import matmul
from tokenmill.model.kernels.triton.expert_matrices import numbers_of


def drawn_groups(
    rng: np.random.Generator, counts: np.ndarray, tokens: int | None = None
) -> tuple[matmul.Groups, torch.Tensor]:
    """So many rows of each group, of `tokens` rows of x or of their own; and the group of each row."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    of_rows = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(DEVICE)
    sources = None if tokens is None else torch.from_numpy(rng.integers(0, tokens, starts[-1])).to(DEVICE)
    return matmul.Groups(torch.from_numpy(starts).to(DEVICE), of_rows, sources), of_rows.long()


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
        x = torch.randn(tokens, depth, device=DEVICE)
        weights = torch.randn(num_groups, columns, depth, device=DEVICE)
        groups, of_rows = drawn_groups(rng, counts, tokens)
        got = matmul.grouped_multiply(x, weights, groups)
        want = torch.einsum("pd,pcd->pc", x[groups.sources], weights[of_rows])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_groups_of_matrices_in_mxfp4_give_the_products_of_their_numbers(rng: np.random.Generator) -> None:
    for dtype in (torch.float32, HALF):
        num_groups, depth, columns, tokens = 3, 32 * int(rng.integers(1, 6)), int(rng.integers(1, 140)), 9
        blocks = torch.from_numpy(rng.integers(0, 256, (num_groups, columns, depth // 32, 16), dtype=np.uint8))
        exponents = torch.from_numpy(rng.integers(118, 127, (num_groups, columns, depth // 32), dtype=np.uint8))
        exponents[0, 0] = 0
        weights = torch.stack([numbers_of(one[0].flatten(1), one[1]) for one in zip(blocks, exponents, strict=True)])
        x = torch.randn(tokens, depth).to(dtype).to(DEVICE)
        groups, _ = drawn_groups(rng, rng.choice([0, 1, 3, 65], num_groups), tokens)
        got = matmul.grouped_multiply(x, blocks.flatten(2).to(DEVICE), groups, exponents.to(DEVICE))
        want = matmul.grouped_multiply(x, weights.to(dtype).to(DEVICE), groups)
        assert same(got, want), "the numbers are exact in any type, and the sums the same"


# Rows of a group: none, one, those about a tile of weights that are widened, and about one of rounded rows.
ROWS = [0, 1, 2, 31, 32, 33, 65, 127, 129]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rounds", [False, True], ids=["widened", "rounded"])
def test_groups_of_matrices_in_eight_bit_floats_give_the_products_of_their_numbers(
    rng: np.random.Generator, dtype: torch.dtype, rounds: bool
) -> None:
    # The last: fewer rows than groups, and more of one than a tile has.
    many = rng.permutation([33, 2, *[0] * 34]).tolist()
    for counts in ([0, 1, 0], [1], many, rng.choice(ROWS, 3), rng.choice(ROWS, int(rng.integers(1, 6)))):
        depth, columns, tokens = int(rng.integers(1, 300)), int(rng.integers(1, 200)), int(rng.integers(1, 20))
        has_sources, has_biases = rng.random(2) < 0.5
        groups, of_rows = drawn_groups(rng, np.array(counts), tokens if has_sources else None)
        source = groups.sources if has_sources else torch.arange(len(of_rows), device=DEVICE)
        # What no row asks for must not be read: rows behind x, matrices of groups without rows.
        x = torch.full((max(tokens, len(of_rows)) + 40, depth), torch.nan, dtype=dtype, device=DEVICE)
        x[source] = torch.randn(len(source), depth).to(dtype).to(DEVICE)
        dense = torch.randn(len(counts), columns, depth) * depth**-0.5
        dense *= torch.from_numpy(10.0 ** rng.uniform(-3, 3, (len(counts), columns, 1))).float()
        dense[[number for number, count in enumerate(counts) if not count]] = torch.nan
        numbers, scales = (part.to(DEVICE) for part in quantize_rows(dense))
        biases = torch.randn(len(counts), columns).to(dtype).to(DEVICE) if has_biases else None
        rounded = tuple(part.to(DEVICE) for part in quantize_rows(x.cpu())) if rounds else None
        got = matmul.grouped_multiply(x, numbers, groups, scales, biases, rounded)
        taken = x[source].double() if rounded is None else (rounded[0].double() * rounded[1])[source]
        want = torch.einsum("pd,pcd->pc", taken, (numbers.double() * scales)[of_rows])
        want = want if biases is None else want + biases[of_rows]
        assert got.dtype == dtype and got.shape == (len(of_rows), columns)
        near = 1e-4 if dtype == torch.float32 else 0.01
        # Of each sum, whatever its scale is.
        size = taken.abs().amax(1)[:, None] * scales[of_rows, :, 0] * 448 + (0.0 if biases is None else 1.0)
        assert ((got.double() - want).abs() <= near * size).all()


def test_every_eight_bit_float_of_a_group_is_itself() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[numbers.float().isfinite()]
    weights = torch.zeros(2, len(numbers), 32, dtype=FP8)
    weights[1, :, 7] = numbers
    x = torch.zeros(2, 32, dtype=HALF)
    x[1, 7] = 1.0
    groups, _ = drawn_groups(np.random.default_rng(0), np.array([0, 2]))
    scales = torch.ones(2, len(numbers), 1, device=DEVICE)
    for rounded in (None, tuple(part.to(DEVICE) for part in quantize_rows(x))):
        got = matmul.grouped_multiply(x.to(DEVICE), weights.to(DEVICE), groups, scales, None, rounded)
        assert torch.equal(got[1].cpu().float(), numbers.float())
        assert not got[0].any()
