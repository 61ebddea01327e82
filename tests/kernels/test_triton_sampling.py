"""The draws in Triton against `reference`: the same token for the same packed draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu import DEVICE
from tests.sampling.oracle import draws_of
from tokenmill.core.sampling_params import MAX_INT, SamplingParams
from tokenmill.sampling import reference, triton_draw
from tokenmill.sampling.draws import NO_TOKEN, RECORD, Kind, column, pack
from tokenmill.sampling.triton_draw import draw


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_draw, "TILE", 128)


def random_logits(rng: np.random.Generator, rows: int, size: int) -> torch.Tensor:
    logits = torch.randn(rows, size) * float(rng.choice([0.5, 3.0, 20.0]))
    # bfloat16 models give many equal logits.
    return logits.bfloat16().float() if rng.random() < 0.5 else logits


def random_draws(rng: np.random.Generator, rows: int, size: int, kinds: np.ndarray) -> torch.Tensor:
    records = np.zeros(rows, dtype=RECORD)
    records["kind"] = kinds
    records["top_k"] = np.where(rng.random(rows) < 0.5, MAX_INT, rng.integers(1, size + 1, rows))
    records["temperature"] = rng.choice([1e-6, 0.3, 0.6, 1.0, 2.0], rows)
    records["top_p"] = np.where(rng.random(rows) < 0.5, 1.0, rng.random(rows))
    records["min_p"] = np.where(rng.random(rows) < 0.6, 0.0, rng.random(rows) * 0.3)
    records["uniform"] = rng.random(rows)
    return torch.from_numpy(pack(records)).to(DEVICE)


def is_at_a_border(logits: torch.Tensor, draws: torch.Tensor) -> bool:
    """Whether a slightly different uniform or nucleus gives the reference another token: rounding decides then."""
    tokens = set()
    for factor in (1 - 1e-5, 1.0, 1 + 1e-5):
        for share in (1 - 1e-5, 1.0, 1 + 1e-5):
            moved = draws.clone()
            column(moved, "temperature").mul_(1 + (factor - 1) / 10)
            column(moved, "top_p").mul_(share).clamp_(max=1.0)
            column(moved, "min_p").mul_(share)
            column(moved, "uniform").mul_(factor).add_(factor - 1).clamp_(0, 1 - 1e-12)
            tokens.add(int(reference.draw(logits, moved)))
    return len(tokens) > 1


def test_every_kind_of_draw_gives_the_token_of_the_reference(rng: np.random.Generator) -> None:
    rows, borders = 8, 0
    for size in (1, 5, 128, 300):
        logits = random_logits(rng, rows, size)
        draws = random_draws(rng, rows, size, np.minimum(rng.permutation(rows) % 5, Kind.FILTERED))
        got, want = draw(logits.to(DEVICE), draws).tolist(), reference.draw(logits, draws.cpu()).tolist()
        for row in range(rows):
            if got[row] != want[row]:
                one = slice(row, row + 1)
                assert is_at_a_border(logits[one], draws[one].cpu()), f"size {size}, row {row}: {got[row]}"
                borders += 1
    assert borders <= 4


def test_the_draws_follow_the_distribution(rng: np.random.Generator) -> None:
    """Uniforms on a grid meet each token as often as its weight says."""
    size, rows = 6, 24
    logits = torch.tensor([[1.0, 1.0, 0.0, 2.0, -1.0, 2.0]]).expand(rows, size)
    draws = draws_of(SamplingParams(top_k=3), size, (np.arange(rows) + 0.5) / rows)
    counts = torch.bincount(draw(logits.to(DEVICE), draws.to(DEVICE)).cpu(), minlength=6)
    # Top 3: the two twos, and of the ones the lower id.
    weights = torch.tensor([np.e, 0, 0, np.e**2, 0, np.e**2])
    torch.testing.assert_close(counts / rows, (weights / weights.sum()).float(), rtol=0, atol=1.5 / rows)


@pytest.mark.parametrize("kind", Kind)
def test_logits_that_are_no_numbers_give_no_token(kind: Kind, rng: np.random.Generator) -> None:
    logits = torch.randn(6, 40)
    logits[0, 7], logits[1, 39], logits[2], logits[3], logits[4, 5] = (
        torch.nan,
        torch.inf,
        torch.nan,
        -torch.inf,
        -torch.inf,
    )
    draws = random_draws(rng, 6, 40, np.full(6, kind))
    got = draw(logits.to(DEVICE), draws).tolist()
    assert got[:4] == [NO_TOKEN] * 4
    assert all(0 <= token < 40 and token != 5 for token in got[4:5])
    assert 0 <= got[5] < 40


def test_a_rows_token_does_not_depend_on_other_rows(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 4, 200).to(DEVICE)
    draws = random_draws(rng, 4, 200, np.array([1, 2, 2, 0]))
    together = draw(logits, draws)
    for row in (0, 2):
        assert draw(logits[row : row + 1], draws[row : row + 1])[0] == together[row]
