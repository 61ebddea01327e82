"""The draws in Triton against `reference`: the same token for the same packed draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, IS_INTERPRETED
from tests.model.sampling.oracle import draws_of
from tokenmill.core.sampling_params import MAX_INT, SamplingParams
from tokenmill.model.sampling import reference, triton_draw
from tokenmill.model.sampling.draws import NO_TOKEN, RECORD, Kind, pack
from tokenmill.model.sampling.reference import column
from tokenmill.model.sampling.triton_draw import draw


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a row; and few programs, each of which takes the interpreter long."""
    set_sizes(monkeypatch, chunk=256, tile=128, programs=1)


def set_sizes(monkeypatch: pytest.MonkeyPatch, chunk: int, tile: int, programs: int) -> None:
    for name, value in (("CHUNK", chunk), ("TILE", tile), ("_PROGRAMS", programs)):
        monkeypatch.setattr(triton_draw, name, value)


def filtered(rows: int, size: int, uniforms: list[float], **params: float) -> torch.Tensor:
    """Draws of the same parameters."""
    draws = draws_of(SamplingParams(**params), size, np.resize(np.array(uniforms), rows))
    return torch.from_numpy(draws).to(DEVICE)


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
    """Return True if rounding decides: a slightly different uniform or nucleus gives the reference another token."""
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
    rows, borders = 5, 0
    for size in (1, 5, 331):
        logits = random_logits(rng, rows, size)
        draws = random_draws(rng, rows, size, np.minimum(rng.permutation(rows) % 5, Kind.FILTERED))
        borders += compare(logits, draws)
    assert borders <= 4


def compare(logits: torch.Tensor, draws: torch.Tensor) -> int:
    """Count the rows so near a border that rounding may give another token than the reference's, and does."""
    got, want = draw(logits.to(DEVICE), draws).tolist(), reference.draw(logits.float(), draws.cpu()).tolist()
    differing = [row for row in range(len(got)) if got[row] != want[row]]
    for row in differing:
        one = slice(row, row + 1)
        assert is_at_a_border(logits[one].float(), draws[one].cpu()), f"row {row}: {got[row]} instead of {want[row]}"
    return len(differing)


@pytest.mark.parametrize(("size", "chunk", "tile"), [(4097, 1024, 1024), (20_000, 4096, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_many_chunks_give_the_token_of_the_reference(
    size: int, chunk: int, tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    set_sizes(monkeypatch, chunk, tile, programs=1)
    logits = random_logits(rng, 4, size).to(dtype)
    draws = random_draws(rng, 4, size, np.array([Kind.GREEDY, Kind.UNFILTERED, Kind.FILTERED, Kind.FILTERED]))
    column(draws, "top_k")[2], column(draws, "top_k")[3] = int(rng.integers(1, 200)), MAX_INT
    assert compare(logits, draws) <= 1


def no_search(*_: object) -> None:
    raise AssertionError("a row was searched by one program")


@pytest.mark.skipif(not IS_INTERPRETED, reason="looks into the kernel")
def test_lists_hold_what_filters_leave_of_a_flat_row(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Thousands of tokens are kept, and still a row is not searched by one program."""
    monkeypatch.setattr(triton_draw, "draw_by_search", no_search)
    set_sizes(monkeypatch, 4096, 2048, programs=1)
    logits = torch.randn(4, 9000) * 0.5
    draws = random_draws(rng, 4, 9000, np.full(4, Kind.FILTERED))
    column(draws, "temperature").fill_(1.0)
    for name, values in (("top_k", [MAX_INT, 900, MAX_INT, 50]), ("top_p", [0.9, 0.8, 1.0, 1.0])):
        column(draws, name).copy_(torch.tensor(values))
    column(draws, "min_p").copy_(torch.tensor([0.0, 0.0, 0.05, 0.0]))
    assert compare(logits, draws) <= 1


def test_of_ties_the_lowest_ids_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the threshold of top-k and of top-p, in rows of few values, and where more tie than a list holds."""
    set_sizes(monkeypatch, chunk=2048, tile=2048, programs=1)
    size = 1500
    logits = torch.zeros(4, size)
    logits[0, ::3] = 2.0  # 500 equal ones
    logits[1, 700:706] = 1.0
    logits[3, 1499] = 20.0
    params = ({"top_k": 20}, {"top_k": 9}, {"top_p": 0.25}, {"top_k": 1400})
    draws = torch.cat([filtered(1, size, [0.999], **one) for one in params])
    assert draw(logits.to(DEVICE), draws).tolist() == [57, 2, 374, 1499]
    assert reference.draw(logits, draws.cpu()).tolist() == [57, 2, 374, 1499]


def test_masked_rows_keep_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k reaches the masked tokens, top-p does not; neither draws one."""
    if IS_INTERPRETED:
        monkeypatch.setattr(triton_draw, "draw_by_search", no_search)
    size = 600
    logits = torch.full((3, size), -torch.inf)
    logits[:, 599] = -3.0
    logits[1:, [5, 300]] = torch.tensor([-3.0, -80.0])
    draws = torch.cat([filtered(1, size, [0.999], **one) for one in ({"top_k": 20}, {"top_k": 20}, {"top_p": 0.4})])
    assert draw(logits.to(DEVICE), draws).tolist() == reference.draw(logits, draws.cpu()).tolist() == [599, 599, 5]


@pytest.mark.parametrize("top_p", [1e-9, 1.0])
def test_the_ends_of_top_p(top_p: float, rng: np.random.Generator) -> None:
    logits = torch.randn(2, 300)
    draws = random_draws(rng, 2, 300, np.full(2, Kind.FILTERED))
    column(draws, "top_p").fill_(top_p)
    column(draws, "top_k").copy_(torch.tensor([MAX_INT, 300]))
    column(draws, "temperature").fill_(1.0)
    compare(logits, draws)
    if top_p < 1:
        assert draw(logits.to(DEVICE), draws).tolist() == logits.argmax(-1).tolist()


def test_the_draws_follow_the_distribution(rng: np.random.Generator) -> None:
    """Uniforms on a grid meet each token as often as its weight says."""
    size, rows = 6, 8
    logits = torch.tensor([[1.0, 1.0, 0.0, 2.0, -1.0, 2.0]]).expand(rows, size)
    draws = torch.from_numpy(draws_of(SamplingParams(top_k=3), size, (np.arange(rows) + 0.5) / rows))
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


def test_a_rows_token_does_not_depend_on_other_rows_or_on_the_number_of_programs(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(rng, 4, 300).to(DEVICE)
    draws = random_draws(rng, 4, 300, np.array([1, 2, 2, 0]))
    together = draw(logits, draws)
    set_sizes(monkeypatch, chunk=256, tile=128, programs=8)
    for row in (0, 2):
        assert draw(logits[row : row + 1], draws[row : row + 1])[0] == together[row]
