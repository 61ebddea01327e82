"""Policies by name: order, batches, admission, waiting for something else, the cache as a whole."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tokenmill.core.request import RequestStatus


def test_priority_goes_first_and_the_worst_is_the_victim() -> None:
    harness = Harness(policy="priority", num_pages=6, max_num_seqs=2)
    low = harness.add([1, 2, 3, 4, 5], max_tokens=14, priority=5)
    harness.step()
    high = harness.add([9, 8, 7, 6, 5], max_tokens=14, priority=-1)
    harness.drain()
    assert harness.scheduler.state.num_preemptions > 0
    order = [request_id for plan in plans(harness) for request_id in plan]
    assert max(i for i, r in enumerate(order) if r == high) < max(i for i, r in enumerate(order) if r == low)


def test_prefill_first_never_mixes_prompts_with_decodes() -> None:
    harness = Harness(batch_policy="prefill-first", budget=8)
    for n in range(3):
        harness.add([n * 5 + k for k in range(5)], max_tokens=4)
    harness.step()
    harness.add([40, 41, 42], max_tokens=3)
    harness.drain()
    for plan in harness.runner.plans:
        prompt_ends = [len(harness.records[request_id].prompt) for request_id in plan.request_ids]
        decodes = [computed >= end for computed, end in zip(plan.num_computed, prompt_ends, strict=True)]
        assert all(decodes) or not any(decodes), f"step {plan.step} is mixed"
    assert plans(harness)[1] == {"1": 2, "2": 5, "3": 1}, "new prompts start before the first request decodes"


def test_decode_first_leaves_no_decode_out_for_a_prompt() -> None:
    harness = Harness(batch_policy="decode-first", budget=4)
    decodes = [harness.add([n], max_tokens=8) for n in (20, 21)]
    harness.step()
    prompts = [harness.add([n] * 5, max_tokens=2) for n in (30, 31)]
    harness.drain()
    steps = plans(harness)
    assert all(steps[at][name] == 1 for at in range(1, 8) for name in decodes), "a decode is in every step"
    assert [steps[at].get(prompts[0]) for at in (1, 2, 3)] == [2, 2, 1], "prompts take what decodes leave"


def test_reserve_admits_fewer_and_never_preempts() -> None:
    prompts = [[n * 10 + k for k in range(8)] for n in range(3)]
    harness = Harness(num_pages=8, max_num_seqs=3, admission="reserve")
    for prompt in prompts:
        harness.add(prompt, max_tokens=12)
    harness.step()
    assert len(harness.scheduler.state.running) == 1, "20 tokens are 5 pages of 4; 8 pages hold one such request"
    assert "needs 5 pages" in harness.scheduler.explain("1")
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 0


def test_a_request_that_waits_for_something_else_is_passed_over_and_keeps_its_place() -> None:
    harness = Harness(max_num_seqs=1)
    held = harness.add([1, 2, 3], max_tokens=2, status=RequestStatus.WAITING_FOR_GRAMMAR)
    first, second = harness.add([4, 5, 6], max_tokens=2), harness.add([7, 8, 9], max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(held) == "is waiting for grammar"
    harness.engine.wake("no such id")
    harness.engine.wake(held)
    harness.drain()
    order = list(dict.fromkeys(request_id for step in plans(harness) for request_id in step))
    assert order == [first, held, second]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_reset_is_refused_while_requests_run_or_preempts_them_when_asked(depth: int) -> None:
    harness = Harness(depth=depth, num_pages=20)
    for n in range(3):
        harness.add([n, 1, 2, 3, 4, 5, 6, 7], max_tokens=8)
    for _ in range(3):
        harness.step()
    assert not harness.engine.reset_prefix_cache()
    done = harness.engine.reset_prefix_cache(preempt_running=True)
    assert done == (depth == 1), "pages that a launched step uses cannot be forgotten yet"
    harness.scheduler.check_invariants()
    harness.drain()
    assert harness.engine.reset_prefix_cache()
    assert harness.kv.cache.num_evictable == 0


@pytest.mark.parametrize("batch_policy", ["mixed", "decode-first", "prefill-first"])
def test_a_request_that_holds_twice_what_the_cache_has_goes_on_from_the_cache_at_once(batch_policy: str) -> None:
    harness = Harness(num_pages=8, page_size=1, max_num_seqs=2, budget=5, max_model_len=8, batch_policy=batch_policy)
    for _ in range(2):
        harness.add([0, 0], max_tokens=6)
    harness.drain()
    assert harness.scheduler.state.num_preemptions > 0
