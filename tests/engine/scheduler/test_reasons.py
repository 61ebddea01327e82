"""Check the scheduler's reports: why a request waits, how many wait for what, what came from the cache."""

from __future__ import annotations

from tests.engine.scheduler.harness import Harness
from tokenmill.core.request import RequestStatus


def test_rows_limit_how_many_run_and_the_reason_is_given() -> None:
    harness = Harness(max_num_seqs=2)
    ids = [harness.add([n, n + 1], max_tokens=3) for n in range(3)]
    harness.step()
    assert len(harness.scheduler.state.running) == 2
    assert "needs a row" in harness.scheduler.explain(ids[2])
    harness.drain()


def test_second_identical_prompt_hits_pages_while_the_first_still_runs() -> None:
    harness = Harness()
    prompt = list(range(12))
    harness.add(prompt, max_tokens=6)
    harness.step()
    second = harness.add(prompt, max_tokens=2)
    harness.drain()
    assert harness.records[second].num_cached_tokens == 8, "all full pages but the one with the last token"


def test_hits_are_counted_once_per_admission_and_again_after_a_preemption() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    for n in range(3):
        harness.add([n * 10 + k for k in range(8)], max_tokens=12)
    harness.drain()
    admissions = sum(len(plan.new_rows) for plan in harness.runner.plans)
    assert admissions == 3 + harness.scheduler.state.num_preemptions
    queried = sum(len(row.token_ids) for plan in harness.runner.plans for row in plan.new_rows)
    assert harness.kv.num_queried_tokens == queried


def test_a_request_behind_others_is_told_how_many_and_why_the_first_waits() -> None:
    harness = Harness(max_num_seqs=1)
    ids = [harness.add([n, 1, 2], max_tokens=5) for n in range(3)]
    assert harness.scheduler.explain(ids[0]) == "has just arrived"
    assert harness.scheduler.explain(ids[2]) == "2 ahead of it; the first: has just arrived"
    harness.step()
    assert harness.scheduler.explain(ids[0]) == "", "it runs"
    assert harness.scheduler.explain(ids[1]) == "needs a row, all 1 are in use"
    assert harness.scheduler.explain(ids[2]) == "1 ahead of it; the first: needs a row, all 1 are in use"
    harness.drain()


def test_the_reasons_name_pages_and_budget() -> None:
    harness = Harness(num_pages=8, budget=16)
    harness.add(list(range(16)), max_tokens=10)
    big, small = harness.add([40] * 17, max_tokens=2), harness.add([41, 42, 43], max_tokens=2)
    harness.step()
    harness.step()
    assert harness.scheduler.explain(big) == "needs 5 pages, 3 are free or evictable"
    assert harness.scheduler.explain(small).startswith("1 ahead of it; the first: needs 5 pages")
    harness.drain()


def test_one_page_is_a_page() -> None:
    harness = Harness(num_pages=4, budget=32)
    harness.add(list(range(15)), max_tokens=1)
    late = harness.add([40], max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(late) == "needs 1 page, 0 are free or evictable"
    harness.drain()


def test_pages_that_the_cache_has_already_are_not_called_needed() -> None:
    harness = Harness(num_pages=8)
    prompt = list(range(8))
    harness.add(prompt, max_tokens=1)
    harness.drain()
    harness.add([30] * 13, max_tokens=8)
    harness.step()
    late = harness.add([*prompt, *range(20, 30)], max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(late) == "needs 3 pages, 4 are free or evictable"
    harness.drain()


def test_no_row_is_taken_and_no_page_held_while_a_request_waits() -> None:
    harness = Harness(num_pages=8, budget=16)
    harness.add(list(range(16)), max_tokens=10)
    harness.add([40] * 17, max_tokens=2)
    harness.step()
    before = harness.kv.num_available
    harness.step()
    assert harness.kv.num_available in (before, before - 1), "only the running request may have taken a page"
    assert harness.scheduler.state.rows.num_free == 3
    harness.drain()


def test_what_a_preempted_request_finds_again_of_its_own_is_not_called_cached() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    for n in range(3):
        harness.add([n * 10, n * 10 + 1, n * 10 + 2], max_tokens=20)
    harness.drain()
    assert harness.scheduler.state.num_preemptions > 0
    assert [record.num_cached_tokens for record in harness.records.values()] == [0, 0, 0]


def test_a_request_that_found_the_budget_used_up_is_told_so() -> None:
    harness = Harness(budget=8)
    harness.add(list(range(30)), max_tokens=1)
    other = harness.add([1, 2], max_tokens=1)
    harness.step()
    assert harness.scheduler.explain(other) == "the token budget of the step is used up"
    harness.drain()


def test_waiting_requests_that_only_lack_room_are_counted_apart() -> None:
    harness = Harness(max_num_seqs=2, num_pages=20, budget=16)
    harness.add([1, 2], max_tokens=2, status=RequestStatus.WAITING_FOR_GRAMMAR)
    for _ in range(3):
        harness.add(list(range(9)), max_tokens=2)
    for _ in range(2):
        harness.add([3, 4], max_tokens=2)
    harness.step()
    assert (harness.engine.stats().num_waiting, harness.engine.stats().num_queued) == (4, 1)
    harness.scheduler.wake("0")
    harness.drain()
