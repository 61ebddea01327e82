"""Requests in the background run beside all others, whatever the policy: they come after them and yield to them."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tests.seeding import seed_for

POLICIES = ["fair", "fcfs", "priority"]
SEED = seed_for(__name__)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50) for _ in range(length)]


def first_step_of(harness: Harness, request_id: str) -> int:
    return next(step for step, plan in enumerate(plans(harness)) if request_id in plan)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_policy", ["mixed", "decode-first", "prefill-first"])
def test_one_that_comes_later_is_served_before_all_that_wait_in_the_background(policy, batch_policy):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    harness = Harness(policy=policy, batch_policy=batch_policy, num_pages=200, max_num_seqs=4, budget=16)
    lines = [harness.add(prompt_of(rng, 12), 8, tenant="batch", is_background=True) for _ in range(12)]
    for _ in range(rng.randrange(1, 6)):
        harness.step()
    launched = len(harness.runner.plans)
    unstarted = [line for line in lines if not any(line in plan for plan in plans(harness))]
    # The worst that the policy knows: it still comes before the background.
    late = harness.add(prompt_of(rng, 10), 4, tenant="key", priority=9)
    harness.drain()
    assert first_step_of(harness, late) <= launched + 1, "in the next step, or after the one that prefills"
    assert all(first_step_of(harness, line) >= first_step_of(harness, late) for line in unstarted)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_in_the_background_leaves_the_budget_to_others(policy):
    harness = Harness(policy=policy, num_pages=200, max_num_seqs=4, budget=16, max_model_len=400)
    line = harness.add([1] * 300, 4, is_background=True)
    harness.step()
    assert plans(harness)[0] == {line: 16}
    late = harness.add([2] * 14, 4)
    harness.step()
    assert plans(harness)[1] == {late: 14, line: 2}
    harness.drain()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ["whole-prompt", "optimistic", "reserve"])
def test_rows_and_pages_of_the_background_are_given_to_whoever_else_waits(policy, admission):
    harness = Harness(policy=policy, admission=admission, num_pages=13, page_size=4, max_num_seqs=3, budget=32)
    for number in range(3):
        harness.add([number + 1] * 9, 6, tenant="batch", is_background=True)
    harness.step()
    harness.step()
    assert len(harness.scheduler.state.running) == 3
    late = harness.add([9] * 20, 6, tenant="key")
    harness.step()
    assert late in plans(harness)[-1], "although all rows, and nearly all pages, were taken"
    assert harness.scheduler.state.num_preemptions > 0
    harness.drain()  # checks every output: nobody lost a token by it


@pytest.mark.parametrize("policy", POLICIES)
def test_the_background_never_preempts(policy):
    harness = Harness(policy=policy, num_pages=9, page_size=4, max_num_seqs=3, budget=32)
    for number in range(2):
        harness.add([number + 1] * 10, 5, tenant=f"key {number}")
    harness.step()
    for number in range(4):
        harness.add([number + 5] * 9, 3, tenant="batch", is_background=True)
    while harness.engine.has_work:
        harness.step()
        assert not [one for one in harness.scheduler.requests.values() if one.num_preemptions and not one.is_background]
    harness.drain()
    ends = [max(step for step, plan in enumerate(plans(harness)) if str(one) in plan) for one in range(6)]
    assert max(ends[:2]) < min(ends[2:]), "and gets on when there is room"


def test_turns_of_the_background_are_no_turns_of_others():
    """A tenant's own lines do not put it behind others, and being served alone does not put it before them."""
    harness = Harness(policy="fair", num_pages=200, max_num_seqs=2, budget=8)
    for number in range(8):
        harness.add([number + 1] * 8, 8, tenant="key 0", is_background=True)
    for _ in range(12):
        harness.step()
    first = harness.add([11] * 4, 2, tenant="key 0")
    second = harness.add([12] * 4, 2, tenant="key 1")
    harness.step()
    assert list(plans(harness)[-1])[:2] == [first, second]
    harness.drain()


def test_what_waits_in_the_background_is_not_counted_as_a_queue():
    harness = Harness(num_pages=200, max_num_seqs=1)
    for number in range(3):
        harness.add([number + 1] * 4, 4, is_background=number > 0)
    harness.step()
    assert (harness.engine.stats().num_waiting, harness.engine.stats().num_queued) == (2, 0)
    harness.add([9] * 4, 4)
    assert harness.engine.stats().num_queued == 1
    harness.drain()
