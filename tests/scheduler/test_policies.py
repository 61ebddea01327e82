"""Policies by name: order, batches, admission, groups, waiting for something else, the cache as a whole."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import Harness, plans
from tokenmill.request import FinishReason, RequestStatus


def test_priority_goes_first_and_the_worst_is_the_victim() -> None:
    harness = Harness(policy="priority", num_pages=6, max_num_seqs=2)
    low = harness.add([1, 2, 3, 4, 5], max_tokens=14, priority=5)
    harness.step()
    high = harness.add([9, 8, 7, 6, 5], max_tokens=14, priority=-1)
    harness.drain()
    assert harness.scheduler.books.num_preemptions > 0
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


def test_reserve_admits_fewer_and_never_preempts() -> None:
    prompts = [[n * 10 + k for k in range(8)] for n in range(3)]
    harness = Harness(num_pages=8, max_num_seqs=3, admission="reserve")
    for prompt in prompts:
        harness.add(prompt, max_tokens=12)
    harness.step()
    assert harness.scheduler.num_running == 1, "20 tokens are 5 pages of 4; 8 pages hold one such request"
    assert "needs 5 pages" in harness.scheduler.explain("1")
    harness.drain()
    assert harness.scheduler.books.num_preemptions == 0


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


def test_a_group_computes_its_prompt_once_and_shares_its_pages() -> None:
    harness = Harness(num_pages=20)
    prompt = list(range(12))
    ids = [harness.add(prompt, max_tokens=2 + n, group="g") for n in range(3)]
    harness.step()
    assert "compute the prompt they share" in harness.scheduler.explain(ids[1])
    harness.drain()
    assert [harness.records[i].num_cached_tokens for i in ids] == [0, 8, 8]


def test_the_next_of_a_group_takes_over_when_the_first_is_aborted() -> None:
    harness = Harness()
    ids = [harness.add(list(range(12)), max_tokens=2, group="g") for _ in range(3)]
    harness.abort(ids[0])
    harness.drain()
    assert [harness.records[i].num_cached_tokens for i in ids] == [0, 0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_aborting_a_group_aborts_all_of_it(depth: int) -> None:
    harness = Harness(depth=depth)
    ids = [harness.add(list(range(9)), max_tokens=8, group="g") for _ in range(3)]
    other = harness.add([1, 2], max_tokens=2)
    for _ in range(3):
        harness.step()
    harness.abort(*ids)
    assert [harness.records[i].finish_reason for i in ids] == [FinishReason.ABORT] * 3
    harness.drain()
    assert harness.records[other].finish_reason is FinishReason.LENGTH


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


def test_common_prefix_pages_are_those_of_all_running_requests() -> None:
    harness = Harness(num_pages=20)
    harness.add(list(range(16)), max_tokens=9)
    harness.step()
    assert harness.scheduler.num_common_prefix_pages() == 4
    harness.add([*range(8), 40, 41], max_tokens=9)
    harness.step()
    assert harness.scheduler.num_common_prefix_pages() == 2
    harness.add([45, 46], max_tokens=9)
    harness.step()
    assert harness.scheduler.num_common_prefix_pages() == 0
    harness.drain()
    assert harness.scheduler.num_common_prefix_pages() == 0


@pytest.mark.parametrize("batch_policy", ["mixed", "prefill-first"])
def test_a_request_that_holds_twice_what_the_cache_has_goes_on_from_the_cache_at_once(batch_policy: str) -> None:
    harness = Harness(num_pages=8, page_size=1, max_num_seqs=2, budget=5, max_model_len=8, batch_policy=batch_policy)
    harness.add([0, 0], max_tokens=1)
    harness.add([0, 0], max_tokens=6)
    harness.drain()
    assert harness.scheduler.books.num_preemptions == 1


def test_a_group_waits_for_its_first_only_where_there_is_a_page_to_share() -> None:
    for length, running in ((4, 3), (5, 1)):
        harness = Harness(num_pages=20)
        for _ in range(3):
            harness.add([1] * length, max_tokens=2, group="g")
        harness.step()
        assert harness.scheduler.num_running == running, "the last token is always run, so 4 tokens share no page of 4"
        harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_of_one_token_answers_runs_in_two_steps(depth: int) -> None:
    harness = Harness(num_pages=30, max_num_seqs=8, budget=64, depth=depth)
    for _ in range(8):
        harness.add(list(range(9)), max_tokens=1, group="g")
    harness.drain()
    assert len(harness.runner.plans) == 2, "one computes the prompt, the others share it"
