"""Tenants take turns: a call that brings much does not make others wait, and loses little by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tests.seeding import seed_for
from tokenmill.engine.scheduler.fairness import QUANTUM

SEED = seed_for(__name__)


def make_harness(**overrides: Any) -> Harness:
    settings = {"num_pages": 2000, "page_size": 16, "max_num_seqs": 32, "budget": 128, "max_model_len": 640}
    return Harness(policy="fair", **(settings | overrides))


def ask_for_vectors(harness: Harness, rng: random.Random) -> list[str]:
    prompts = [[rng.randrange(50) for _ in range(500)] for _ in range(64)]
    return [harness.add(prompt, 1, pooling="mean", tenant="big") for prompt in prompts]


def ask_for_prompt_logprobs(harness: Harness, rng: random.Random) -> list[str]:
    prompts = [[rng.randrange(50) for _ in range(500)] for _ in range(32)]
    return [harness.add(prompt, 2, prompt_logprobs=1, tenant="big") for prompt in prompts]


def ask_for_many_answers(harness: Harness, rng: random.Random) -> list[str]:
    prompts = [[rng.randrange(50) for _ in range(50)] for _ in range(8)]
    return [harness.add(prompt, 60, tenant="big") for prompt in prompts for _ in range(16)]


def run_until_idle(harness: Harness, tiny_at: int | None) -> tuple[int, int]:
    """Steps that a tiny request's first token took, and all tokens that were run."""
    waited = 0
    tiny = None
    while harness.engine.has_work:
        if harness.scheduler.step == tiny_at and tiny is None:
            tiny = harness.add([1, 2, 3, 4, 5], max_tokens=3, tenant="tiny")
        harness.collect(harness.engine.step())
        waited += tiny is not None and not harness.records[tiny].tokens
    harness.drain()
    return waited, sum(plan.num_tokens for plan in harness.runner.plans)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ask", [ask_for_vectors, ask_for_prompt_logprobs, ask_for_many_answers])
def test_one_big_call_does_not_make_a_tiny_one_wait_and_loses_little(
    ask: Callable[[Harness, random.Random], list[str]], depth: int
) -> None:
    print(f"seed {SEED}")
    alone = make_harness(depth=depth)
    ask(alone, random.Random(SEED))
    _, tokens_alone = run_until_idle(alone, None)
    moments = random.Random(SEED).sample(range(4, len(alone.runner.plans) - 10), 3)
    for tiny_at in moments:
        harness = make_harness(depth=depth)
        ids = ask(harness, random.Random(SEED))
        waited, tokens = run_until_idle(harness, tiny_at)
        # Two steps until it is its turn, and its own; with overlap one for a row that is in use, and one to be told.
        assert waited <= 2 + 1 + 2 * (depth - 1), f"it came in step {tiny_at} and waited for {waited}"
        assert tokens - 8 <= 1.02 * tokens_alone
        assert all(harness.records[request_id].finish_reason is not None for request_id in ids)


@pytest.mark.parametrize("batch_policy", ["mixed", "decode-first", "prefill-first"])
def test_a_late_call_does_not_wait_for_the_prompts_before_it(batch_policy: str) -> None:
    harness = Harness(policy="fair", num_pages=400, budget=16, max_model_len=200, batch_policy=batch_policy)
    for n in range(3):
        harness.add([n] * 100, max_tokens=1, tenant="big")
    harness.step()
    tiny = harness.add([40, 41, 42], max_tokens=2, tenant="tiny")
    for _ in range(3):
        harness.step()
    assert harness.records[tiny].tokens
    harness.drain()


def test_calls_shorter_than_a_turn_are_served_as_they_come() -> None:
    orders = []
    for policy in ("fair", "fcfs"):
        harness = Harness(policy=policy, num_pages=100, budget=16)
        for n in range(8):
            harness.add([n] * 7, max_tokens=1, tenant=str(n))
        harness.drain()
        orders.append(plans(harness))
    assert orders[0] == orders[1]


def test_two_tenants_with_much_to_do_are_served_alike() -> None:
    harness = Harness(policy="fair", num_pages=600, budget=16, max_num_seqs=8, max_model_len=100)
    for tenant in "ab":
        for n in range(12):
            harness.add([n, ord(tenant) % 50] * 20, max_tokens=1, tenant=tenant)
    for _ in range(20):
        harness.step()
    served = dict.fromkeys("ab", 0)
    for step in plans(harness):
        for request_id, count in step.items():
            served["a" if int(request_id) < 12 else "b"] += count
    assert abs(served["a"] - served["b"]) <= 2 * QUANTUM * 16
    harness.drain()


def test_one_that_holds_all_rows_yields_no_more_than_one_to_a_call_that_needs_one() -> None:
    harness = Harness(policy="fair", num_pages=400, budget=32, max_num_seqs=8, max_model_len=120)
    for n in range(12):
        harness.add([n] * 4, max_tokens=100, tenant="big")
    for _ in range(12):
        harness.step()
    assert len(harness.scheduler.state.running) == 8
    tiny = harness.add([40], max_tokens=4, tenant="tiny")
    while not harness.records[tiny].tokens:
        harness.step()
    victims = [r for r in harness.scheduler.requests.values() if r.num_preemptions]
    assert [(r.id, r.wait_reason) for r in victims] == [("7", "needs a row, all 8 are in use")], "the last in order"
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 1


def test_one_that_holds_most_pages_yields_them_but_never_its_only_request() -> None:
    harness = Harness(policy="fair", num_pages=20, budget=16, max_num_seqs=8, max_model_len=80)
    for n in range(2):
        harness.add([n] * 30, max_tokens=8, tenant="big")
    for _ in range(6):
        harness.step()
    small = harness.add([40] * 20, max_tokens=2, tenant="small")
    for _ in range(4):
        harness.step()
    preempted = [r.id for r in harness.scheduler.requests.values() if r.num_preemptions]
    assert preempted in ([], ["1"])
    harness.drain()
    harness = Harness(policy="fair", num_pages=20, budget=16, max_num_seqs=8, max_model_len=80)
    harness.add([1] * 70, max_tokens=8, tenant="big")
    for _ in range(8):
        harness.step()
    small = harness.add([40] * 20, max_tokens=2, tenant="small")
    harness.step()
    assert harness.scheduler.explain(small).startswith("needs 5 pages")
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 0


def test_reserve_takes_back_no_promise() -> None:
    harness = Harness(policy="fair", num_pages=200, budget=32, max_num_seqs=4, max_model_len=60, admission="reserve")
    for n in range(6):
        harness.add([n] * 4, max_tokens=50, tenant="big")
    for _ in range(6):
        harness.step()
    harness.add([40], max_tokens=4, tenant="tiny")
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 0


def test_priority_comes_before_turns_and_turns_before_arrival() -> None:
    harness = Harness(policy="priority", num_pages=600, budget=16, max_num_seqs=2, max_model_len=100)
    for n in range(4):
        harness.add([n] * 40, max_tokens=1, tenant="big")
    for _ in range(4):
        harness.step()
    other = harness.add([41] * 10, max_tokens=1, tenant="other")
    urgent = harness.add([42] * 10, max_tokens=1, tenant="big", priority=-1)
    harness.drain()
    order = list(dict.fromkeys(request_id for step in plans(harness) for request_id in step))
    assert order.index(urgent) < order.index(other) < order.index("3")


def test_a_tenant_that_was_away_has_earned_nothing_and_owes_nothing() -> None:
    harness = Harness(policy="fair", num_pages=600, budget=16, max_num_seqs=8, max_model_len=100)
    harness.add([1] * 40, max_tokens=1, tenant="away")
    harness.drain()
    for n in range(6):
        harness.add([n + 2] * 40, max_tokens=1, tenant="busy")
    for _ in range(6):
        harness.step()
    harness.add([9] * 40, max_tokens=1, tenant="away")
    ranks = [request.rank for request in harness.scheduler.requests.values()]
    busy, away = ranks[0], ranks[-1]
    assert busy[1] - 1 <= away[1] <= busy[1]
    harness.drain()
