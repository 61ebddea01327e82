"""`Speculation` behind a scheduler: no output changes, requests are held where it pays, a replay drafts the same."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for
from tokenmill.config.speculation import SpeculationSettings, SpeculativeConfig
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Proposal, Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.lab.simulate.replay import replay

SEED = seed_for(__name__)
FREE = [(1, 1.0), (64, 1.0)]
DEAR = [(1, 1.0), (64, 64.0)]


def settings(method: str, costs: list[tuple[int, float]]) -> SpeculationSettings:
    return SpeculationSettings(SpeculativeConfig(method, 6, prompt_lookup_min=1), costs)  # type: ignore[arg-type]


def busy(harness: Harness, rng: random.Random) -> None:
    """Prompts that come again: what followed them is known by then. Sessions, aborts and little room."""
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    for number in range(24):
        prompt = rng.choice(prompts)
        harness.add(prompt, rng.randint(1, 12), priority=rng.randint(0, 1))
        if number == 3:
            harness.open_session(prompt, 4)
        for _ in range(rng.randint(0, 5)):
            harness.step()
        for session in harness.sessions:
            if number % 4 == 0:
                harness.extend(session, [1, 2], 3, is_last=number > 18)
        if number % 9 == 8:
            harness.abort(str(rng.randrange(number)))
    for _ in range(2):  # at the second time, at the latest, it is known what follows
        harness.drain()
        harness.add(prompts[0], 12)
    harness.drain()
    harness.engine.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_no_output_changes_and_a_replay_drafts_the_same(tmp_path: Path, method: str, depth: int) -> None:
    print(f"seed {SEED}")
    harness = Harness(
        depth=depth, num_pages=16, max_model_len=30, speculation=settings(method, FREE), log=tmp_path / "log"
    )
    busy(harness, random.Random(SEED))
    counts = harness.scheduler.draft_counts
    assert counts.num_draft_tokens > 0
    if method == "suffix":
        assert sum(counts.accepted_per_position) > 0, "the same prompts came again"
    outcome = replay(tmp_path / "log")
    assert outcome.difference is None
    assert outcome.num_plans == len(harness.runner.plans)


def test_where_drafts_do_not_pay_the_plans_are_those_without() -> None:
    plans: list[list[StepPlan]] = []
    for speculation in (None, settings("suffix", DEAR), settings("ngram", DEAR)):
        harness = Harness(depth=2, num_pages=14, speculation=speculation)
        busy(harness, random.Random(SEED))
        plans.append(harness.runner.plans)
    for others in plans[1:]:
        assert len(others) == len(plans[0])
        assert all(repr(one) == repr(other) for one, other in zip(plans[0], others, strict=True)), f"seed {SEED}"


def request_of(tokens: list[int], num_prompt_tokens: int | None = None) -> Request:
    request = Request("a", tokens[:num_prompt_tokens], SamplingParams(), arrival=0, max_tokens_total=200)
    request.append_outputs([] if num_prompt_tokens is None else tokens[num_prompt_tokens:])
    return request


def test_a_request_is_held_where_its_text_repeats_and_only_there() -> None:
    speculation = Speculation(settings("suffix", FREE))
    repeating = request_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    other = Request("b", [11, 12, 13, 14, 15], SamplingParams(), arrival=1, max_tokens_total=200)
    assert speculation.holds(repeating, num_running=1)
    assert not speculation.holds(other, num_running=1)
    assert not Speculation(settings("suffix", DEAR)).holds(repeating, num_running=1)


def test_what_a_grammar_forces_comes_before_all_else() -> None:
    speculation = Speculation(settings("suffix", FREE))
    request = request_of([1, 2, 3, 1, 2, 3, 1, 2])
    (drafted,) = speculation.propose([request], [6], 1)
    assert drafted.tolist()[:1] == [3]
    request.proposal = Proposal(np.array([40, 41, 42], dtype=np.int32), is_forced=True)
    (forced,) = speculation.propose([request], [2], 1)
    assert forced.tolist() == [40, 41]


def test_a_draft_model_is_trusted_as_far_as_it_was_right() -> None:
    speculation = Speculation(SpeculationSettings(SpeculativeConfig("draft_model", 4, "x"), [(1, 1.0), (64, 16.0)]))
    request = request_of([1, 2, 3])
    lengths = []
    for _ in range(60):
        request.proposal = Proposal(np.array([7, 8, 9, 10], dtype=np.int32), is_forced=False)
        (drafted,) = speculation.propose([request], [4], 1)
        lengths.append(len(drafted))
        if len(drafted):
            speculation.observe(request, len(drafted), 0)
    assert lengths[0] > 0
    assert sum(lengths[-20:]) < sum(lengths[:20])
    assert speculation.holds(request, 1) is False
    speculation.forget_request(request)
    (drafted,) = speculation.propose([request_of([1, 2, 3])], [4], 1)
    assert not len(drafted), "there is no proposal"
    (drafted,) = speculation.propose([request], [4], 1)
    assert len(drafted) == lengths[0], "a request of the same name begins anew"
