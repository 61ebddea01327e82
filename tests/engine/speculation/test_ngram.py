"""Prompt lookup against a plain search."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.speculation.requests import make_request, next_turn, say
from tests.engine.speculation.slow_model import ngram_draft, text_of
from tokenmill.engine.speculation.speculation import NgramDrafter


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_it_proposes_what_a_search_finds(alphabet: int, rng: np.random.Generator) -> None:
    for _ in range(30):
        low = int(rng.integers(1, 5))
        high = low + int(rng.integers(0, 4))
        drafter = NgramDrafter(low, high)
        request = make_request("a", rng.integers(0, alphabet, rng.integers(1, 40)).tolist(), is_session=True)
        for _ in range(30):
            if rng.random() < 0.15:
                next_turn(request, rng.integers(0, alphabet, rng.integers(1, 9)).tolist())
            say(request, rng.integers(0, alphabet, rng.integers(1, 6)).tolist())
            if rng.random() < 0.7:
                limit = int(rng.integers(0, 12))
                draft = drafter.propose(request, limit)
                assert draft.token_ids.tolist() == ngram_draft(text_of(request), range(low, high + 1), limit)
                assert draft.token_ids.dtype == np.int32 and draft.probabilities.dtype == np.float32
                assert len(draft.probabilities) == len(draft.token_ids)
                assert ((draft.probabilities > 0) & (draft.probabilities < 1)).all()


def test_a_longer_ngram_is_surer() -> None:
    drafter = NgramDrafter(2, 5)
    short = drafter.propose(make_request("short", [7, 1, 2, 8, 9, 1, 2]), 3)
    long = drafter.propose(make_request("long", [7, 0, 3, 1, 2, 8, 9, 7, 0, 3, 1, 2]), 3)
    assert short.token_ids.tolist() == [8, 9, 1] and long.token_ids.tolist() == [8, 9, 7]
    assert (long.probabilities > short.probabilities).all()
    assert short.probabilities[0] == pytest.approx(2 / 3) and long.probabilities[0] == pytest.approx(5 / 6)


def test_repetition_is_drafted_at_full_length() -> None:
    draft = NgramDrafter(2, 5).propose(make_request("a", [1, 2, 3, 1, 2, 3, 1, 2]), 9)
    assert draft.token_ids.tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter(2, 3)
    drafter.propose(make_request("a", [1, 2, 3, 4]), 4)
    assert not len(drafter.propose(make_request("b", [1, 2]), 4).token_ids)


def test_an_id_can_be_used_again_once_forgotten() -> None:
    drafter = NgramDrafter(2, 3)
    first = make_request("a", [1, 2, 3, 1, 2])
    assert drafter.propose(first, 1).token_ids.tolist() == [3]
    drafter.forget_request(first)
    drafter.forget_request(first)
    assert drafter.propose(make_request("a", [1, 2, 4, 1, 2]), 1).token_ids.tolist() == [4]
