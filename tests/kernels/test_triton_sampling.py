"""The sampling kernel against `tokenmill.sampling`: the same token for the same row, parameters and uniform number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu import DEVICE
from tokenmill.kernels.triton import sampling
from tokenmill.kernels.triton.sampling import Draws, sample
from tokenmill.sampling.candidates import finite, first_argmax
from tokenmill.sampling.draw import draw_plain
from tokenmill.sampling.wide import WideDraw, draw_wide

GREEDY, PLAIN, FILTERED = 0, 1, 2


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TILE", 128)


def random_logits(rng: np.random.Generator, rows: int, size: int) -> torch.Tensor:
    logits = torch.randn(rows, size) * float(rng.choice([0.5, 3.0, 20.0]))
    # bfloat16 models give many equal logits.
    return logits.bfloat16().float() if rng.random() < 0.5 else logits


def random_draws(rng: np.random.Generator, rows: int, size: int, kinds: np.ndarray) -> Draws:
    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE)

    return Draws(
        kind=column(kinds.astype(np.int64)),
        top_k=column(np.where(rng.random(rows) < 0.5, size, rng.integers(1, size + 1, rows))),
        temperature=column(rng.choice([1e-6, 0.3, 0.6, 1.0, 2.0], rows)),
        top_p=column(np.where(rng.random(rows) < 0.5, 1.0, rng.random(rows))),
        min_p=column(np.where(rng.random(rows) < 0.6, 0.0, rng.random(rows) * 0.3)),
        uniform=column(rng.random(rows)),
    )


def expected(logits: torch.Tensor, draws: Draws, row: int) -> int:
    kind = int(draws.kind[row])
    if kind == GREEDY:
        return int(first_argmax(logits[row : row + 1]))
    values = finite(logits[row : row + 1])
    if kind == PLAIN:
        return int(draw_plain(values, draws.temperature[row : row + 1].cpu(), draws.uniform[row : row + 1].cpu()))
    how = WideDraw(
        *(float(field[row]) for field in (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform))
    )
    return int(draw_wide(values[0], WideDraw(how.temperature, int(how.top_k), how.top_p, how.min_p, how.uniform)))


def is_at_a_border(logits: torch.Tensor, draws: Draws, row: int) -> bool:
    """Whether a slightly different uniform or nucleus gives the reference another token: rounding decides then."""
    tokens = set()
    for factor in (1 - 1e-5, 1.0, 1 + 1e-5):
        for share in (1 - 1e-5, 1.0, 1 + 1e-5):
            moved = Draws(
                draws.kind,
                draws.top_k,
                draws.temperature * (1 + (factor - 1) / 10),
                (draws.top_p * share).clamp(max=1.0),
                draws.min_p * share,
                (draws.uniform * factor + (factor - 1)).clamp(0, 1 - 1e-12),
            )
            tokens.add(expected(logits, moved, row))
    return len(tokens) > 1


def test_every_kind_of_draw_gives_the_token_of_the_reference(rng: np.random.Generator) -> None:
    rows, borders = 8, 0
    for size in (1, 5, 128, 300):
        logits = random_logits(rng, rows, size)
        draws = random_draws(rng, rows, size, rng.permutation(rows) % 5)
        got = sample(logits.to(DEVICE), draws).tolist()
        for row in range(rows):
            if got[row] != expected(logits, draws, row):
                assert is_at_a_border(logits, draws, row), f"size {size}, row {row}: {got[row]}"
                borders += 1
    assert borders <= 4


def test_the_draws_follow_the_distribution(rng: np.random.Generator) -> None:
    """Uniforms on a grid meet each token as often as its weight says."""
    size, rows = 6, 24
    logits = torch.tensor([[1.0, 1.0, 0.0, 2.0, -1.0, 2.0]]).expand(rows, size)
    grid = torch.from_numpy((np.arange(rows) + 0.5) / rows)
    ones = torch.ones(rows, dtype=torch.float64)
    kinds = torch.full((rows,), FILTERED)
    fields = [kinds, torch.full((rows,), 3), ones, ones, ones * 0.0, grid]
    counts = torch.bincount(
        sample(logits.to(DEVICE), Draws(*(field.to(DEVICE) for field in fields))).cpu(), minlength=6
    )
    # Top 3: the two twos, and of the ones the lower id.
    weights = torch.tensor([np.e, 0, 0, np.e**2, 0, np.e**2])
    torch.testing.assert_close(counts / rows, (weights / weights.sum()).float(), rtol=0, atol=1.5 / rows)


@pytest.mark.parametrize("kind", [GREEDY, PLAIN, FILTERED])
def test_broken_logits_give_some_token(kind: int, rng: np.random.Generator) -> None:
    for poison in (torch.nan, torch.inf, -torch.inf):
        logits = torch.randn(3, 40)
        logits[0, 7] = poison
        logits[1] = poison
        draws = random_draws(rng, 3, 40, np.full(3, kind))
        got = sample(logits.to(DEVICE), draws).tolist()
        assert all(0 <= token < 40 for token in got)
        assert kind != GREEDY or got == first_argmax(logits).tolist()
        assert kind == GREEDY or not np.isnan(poison) or got[0] != 7, "a draw takes no NaN while another is left"


def test_a_rows_token_does_not_depend_on_other_rows(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 4, 200).to(DEVICE)
    draws = random_draws(rng, 4, 200, np.array([1, 2, 2, 0]))
    together = sample(logits, draws)
    for row in (0, 2):
        fields = (draws.kind, draws.top_k, draws.temperature, draws.top_p, draws.min_p, draws.uniform)
        alone = sample(logits[row : row + 1], Draws(*(field[row : row + 1] for field in fields)))
        assert alone[0] == together[row]
