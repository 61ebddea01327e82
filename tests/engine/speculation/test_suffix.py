"""Suffix decoding against its rule, by plain search."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.speculation.requests import STOP, make_request, next_turn, say
from tests.engine.speculation.slow_model import SlowSuffix, Tokens, text_of
from tokenmill.core.request import Request
from tokenmill.engine.speculation import finished_outputs
from tokenmill.engine.speculation.suffix import SuffixDrafter


def check(drafter: SuffixDrafter, slow: SlowSuffix, request: Request, outputs: list[Tokens], limit: int) -> int:
    """Compare one proposal with the slow model's; returns its length."""
    draft = drafter.propose(request, limit)
    expected = slow.draft(text_of(request), outputs, limit)
    assert draft.token_ids.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(draft.probabilities, [probability for _, probability in expected], rtol=1e-5)
    assert draft.token_ids.dtype == np.int32 and draft.probabilities.dtype == np.float32
    return len(expected)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_it_proposes_what_the_rule_says(
    alphabet: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_outputs, "MAX_LINKS", 10_000)
    num_drafted = 0
    for _ in range(12):
        factor, offset = float(rng.choice([0.5, 1, 2])), float(rng.choice([-1.5, 0, 1]))
        slow = SlowSuffix(int(rng.integers(6, 30)), factor, offset, float(rng.choice([0, 0.1237, 0.3141, 0.6173])))
        drafter = SuffixDrafter(
            max_tree_depth=slow.depth,
            max_spec_factor=slow.factor,
            max_spec_offset=slow.offset,
            min_token_prob=slow.min_probability,
            max_cached_tokens=20_000,
        )
        running: dict[str, Request] = {}
        outputs: list[Tokens] = []
        for step in range(120):
            if len(running) < 3:
                name = str(step)
                prompt = rng.integers(0, alphabet, rng.integers(1, 30)).tolist()
                running[name] = make_request(name, prompt, is_session=bool(rng.random() < 0.4))
            request = running[list(running)[rng.integers(len(running))]]
            if request.is_resumable and rng.random() < 0.15:
                next_turn(request, rng.integers(0, alphabet, rng.integers(1, 9)).tolist())
            elif outputs and rng.random() < 0.5:
                output = outputs[rng.integers(len(outputs))]
                start = int(rng.integers(0, len(output)))
                said = output[start : start + int(rng.integers(1, 9))]
                say(request, [token for token in said if token != STOP])
            else:
                say(request, rng.integers(0, alphabet, rng.integers(1, 6)).tolist())
            num_drafted += check(drafter, slow, request, outputs, int(rng.integers(0, 20)))
            if rng.random() < 0.1:
                del running[request.id]
                output = text_of(request)[request.num_prompt_tokens :]
                drafter.forget_request(request)
                outputs += [output] if len(output) > 1 else []
    assert num_drafted > 100


def test_another_request_follows_what_a_finished_one_has_said() -> None:
    drafter = SuffixDrafter()
    first = make_request("a", [50, 51])
    say(first, [1, 2, 3, 4, 5, 6])
    drafter.forget_request(first)
    draft = drafter.propose(make_request("b", [60, 61, 1, 2, 3]), 8)
    assert draft.token_ids.tolist() == [4, 5, 6]
    assert draft.probabilities == pytest.approx([3 / 4, 4 / 5, 5 / 6])
    assert not len(drafter.propose(make_request("c", [49, 50, 51]), 8).token_ids), "a prompt is nobody else's"


def test_a_salted_request_neither_gives_nor_takes() -> None:
    drafter = SuffixDrafter()
    for salt, output in (("", [1, 2, 3, 4]), ("secret", [5, 6, 7, 8])):
        request = make_request("a", [0], salt=salt)
        say(request, output)
        drafter.forget_request(request)
    assert drafter.propose(make_request("b", [1, 2, 3]), 1).token_ids.tolist() == [4]
    assert not len(drafter.propose(make_request("c", [1, 2, 3], salt="secret"), 1).token_ids)
    assert not len(drafter.propose(make_request("d", [5, 6, 7]), 1).token_ids)
    assert not len(drafter.propose(make_request("e", [5, 6, 7], salt="secret"), 1).token_ids)


def test_the_majority_wins_and_of_equals_the_newest() -> None:
    draft = SuffixDrafter().propose(make_request("a", [21, 1, 2, 7, 22, 1, 2, 8, 23, 1, 2, 8, 24, 1, 2]), 8)
    assert draft.token_ids.tolist() == [8, 24]
    assert draft.probabilities == pytest.approx([2 / (3 + 1 / 2), 1 / (2 + 1 / 3)])


def test_what_is_unlikely_is_not_proposed() -> None:
    text = [token for last in range(10, 18) for token in (1, 2, 3, last)] + [9, 1, 2, 3]
    assert SuffixDrafter().propose(make_request("a", text), 1).token_ids.tolist() == [17]
    assert not len(SuffixDrafter(min_token_prob=0.2).propose(make_request("b", text), 1).token_ids)


def test_without_a_cache_only_the_own_text_counts() -> None:
    for none in ({"max_cached_requests": 0}, {"max_cached_tokens": 0}):
        drafter = SuffixDrafter(**none)
        first = make_request("a", [50])
        say(first, [1, 2, 3, 4])
        drafter.forget_request(first)
        assert not len(drafter.propose(make_request("b", [1, 2, 3]), 1).token_ids)
        assert drafter.propose(make_request("c", [1, 2, 3, 1, 2]), 1).token_ids.tolist() == [3]
