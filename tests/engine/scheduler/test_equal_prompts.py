"""Prompts that begin alike and are in flight at the same time: each page of them is computed once."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler.harness import Harness
from tokenmill.core.request import FinishReason


def test_four_equal_long_prompts_cost_one_and_hold_its_pages() -> None:
    harness = Harness(num_pages=3000, page_size=16, max_num_seqs=8, budget=2048, threshold=512, max_model_len=8192)
    generator = random.Random(3)
    prompt = [generator.randrange(50) for _ in range(8000)]
    ids = [harness.add(prompt, max_tokens=4) for _ in range(4)]
    most_pages = 0
    while harness.engine.has_work:
        harness.step()
        most_pages = max(most_pages, harness.kv.num_pinned)
    # Of each further one the last page is run, since its last token is always run: 16 tokens, and 3 more are decoded.
    assert sum(plan.num_tokens for plan in harness.runner.plans) == 8000 + 3 + 3 * (16 + 3)
    assert most_pages <= 501 + 3 * 2, most_pages
    assert [harness.records[i].num_cached_tokens for i in ids] == [0, 7984, 7984, 7984]
    harness.drain()


def test_one_that_waits_for_another_is_told_so_and_those_behind_it_go_on() -> None:
    harness = Harness(num_pages=30)
    first, second = (harness.add(list(range(12)), max_tokens=2) for _ in range(2))
    other = harness.add([40, 41], max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(second) == "waiting for a request that computes the same prompt"
    assert harness.scheduler.counts()["waiting_by_reason"]["same_prompt"] == 1
    assert harness.runner.plans[0].request_ids == (first, other)
    harness.drain()


def test_what_differs_after_its_first_pages_waits_for_these_alone() -> None:
    harness = Harness(num_pages=60, budget=8, max_model_len=64)
    first = harness.add(list(range(32)), max_tokens=2)
    second = harness.add([*range(8), *range(30, 38)], max_tokens=2)
    harness.step()
    assert harness.runner.plans[0].request_ids == (first,)
    requests = harness.scheduler.requests
    while requests[second].num_computed_tokens == 0:
        harness.step()
    assert requests[second].num_cached_tokens == 8
    assert requests[second].awaited_page is None
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_takes_over_when_the_first_is_aborted(depth: int) -> None:
    harness = Harness(depth=depth, budget=8, num_pages=20)
    ids = [harness.add(list(range(16)), max_tokens=2) for _ in range(3)]
    harness.step()
    harness.abort(ids[0])
    harness.drain()
    assert [harness.records[i].finish_reason for i in ids] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 2
    assert harness.records[ids[1]].num_cached_tokens < 12 == harness.records[ids[2]].num_cached_tokens


def test_the_next_takes_over_when_the_first_is_preempted() -> None:
    harness = Harness(num_pages=8, budget=4, max_num_seqs=3, admission="optimistic", policy="priority")
    harness.add([40] * 8, max_tokens=16, priority=-1)
    for _ in range(2):
        harness.step()
    ids = [harness.add(list(range(20)), max_tokens=2, priority=1) for _ in range(2)]
    while harness.scheduler.requests[ids[0]].num_preemptions == 0:
        harness.step()
    harness.drain()
    assert all(record.finish_reason is FinishReason.LENGTH for record in harness.records.values())


@pytest.mark.parametrize(("length", "running"), [(4, 3), (5, 1)])
def test_nobody_waits_where_there_is_no_page_to_share(length: int, running: int) -> None:
    harness = Harness(num_pages=20)
    for _ in range(3):
        harness.add([1] * length, max_tokens=2)
    harness.step()
    assert len(harness.scheduler.state.running) == running, (
        "the last token is always run, so 4 tokens share no page of 4"
    )
    harness.drain()


def test_other_salts_and_whole_prompts_do_not_wait() -> None:
    harness = Harness(num_pages=30, max_num_seqs=8, budget=64)
    harness.add(list(range(12)), max_tokens=2)
    harness.add(list(range(12)), max_tokens=2, salt="other")
    harness.add(list(range(12)), max_tokens=2, prompt_logprobs=1)
    harness.step()
    assert len(harness.scheduler.state.running) == 3
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_eight_answers_of_one_token_to_a_prompt_take_two_steps(depth: int) -> None:
    harness = Harness(num_pages=30, max_num_seqs=8, budget=64, depth=depth)
    for _ in range(8):
        harness.add(list(range(9)), max_tokens=1)
    harness.drain()
    assert len(harness.runner.plans) == 2, "one computes the prompt, the others share it"


@pytest.mark.parametrize("depth", [1, 2])
def test_aborting_all_of_them_leaves_nothing(depth: int) -> None:
    harness = Harness(depth=depth)
    ids = [harness.add(list(range(9)), max_tokens=8) for _ in range(3)]
    other = harness.add([1, 2], max_tokens=2)
    for _ in range(3):
        harness.step()
    harness.abort(*ids)
    assert [harness.records[i].finish_reason for i in ids] == [FinishReason.ABORT] * 3
    harness.drain()
    assert harness.records[other].finish_reason is FinishReason.LENGTH
