"""Preemption by name: who yields, what it is told, how often it is counted, and when it comes back."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.harness import Harness, plans


@pytest.mark.parametrize("batch_policy", ["mixed", "decode-first", "prefill-first"])
def test_one_that_yields_its_own_pages_does_not_come_back_in_the_same_step(batch_policy: str) -> None:
    harness = Harness(num_pages=4, budget=8, max_model_len=16, batch_policy=batch_policy, admission="optimistic")
    first = harness.add([1, 2], max_tokens=6)
    late = harness.add(list(range(10, 24)), max_tokens=1)
    harness.step()
    assert plans(harness) == [{first: 2, late: 6}]
    harness.step()  # the late one needs two pages more, one is there; a shorter chunk of it would fit again at once
    assert plans(harness)[1] == {first: 1}
    assert harness.scheduler.state.num_preemptions == 1
    assert harness.scheduler.explain(late) == "running requests come first, and one of them is short of pages"
    harness.drain()


def test_a_victim_is_told_why_and_each_preemption_is_counted_once() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    ids = [harness.add([n * 10 + k for k in range(8)], max_tokens=12) for n in range(3)]
    counted = dict.fromkeys(ids, 0)
    reasons = set()
    while harness.engine.has_work:
        alive = {i: harness.scheduler.requests[i] for i in ids if i in harness.scheduler.requests}
        running = {i for i, request in alive.items() if request.is_running}
        harness.step()
        for request_id in running:
            if alive[request_id].status.value == "preempted":
                counted[request_id] += 1
                reasons.add(alive[request_id].wait_reason)
                assert alive[request_id].num_computed_tokens == 0, "it is recomputed"
            assert alive[request_id].num_preemptions == counted[request_id]
    assert counted[ids[0]] == 0, "the first in order never yields"
    assert sum(counted.values()) == harness.scheduler.state.num_preemptions > 0
    assert reasons <= {
        "was preempted for a request before it",
        "running requests come first, and one of them is short of pages",
    }
    harness.drain()


def test_idle_sessions_yield_before_anyone_is_preempted_the_last_in_order_first() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    older, newer = (harness.open_session([n] * 5, max_tokens=2) for n in (1, 2))
    while harness.engine.has_work:
        harness.step()
    harness.add(list(range(10, 26)), max_tokens=3)
    while harness.engine.has_work:
        harness.step()
    requests = harness.scheduler.requests
    assert (requests[older].num_preemptions, requests[newer].num_preemptions) == (0, 1)
    assert harness.scheduler.state.num_preemptions == 1
    assert (requests[older].row, requests[newer].row) == (0, None)
    assert (requests[older].num_computed_tokens, requests[newer].num_computed_tokens) == (6, 0)
    harness.drain()


def test_with_a_step_in_flight_the_last_still_yields_and_its_pages_are_waited_for() -> None:
    harness = Harness(num_pages=4, depth=2)
    first, last = (harness.add([n] * 8, max_tokens=8) for n in (1, 2))
    harness.step()
    harness.step()  # the first needs a third page; nobody's pages are about to return, so the last one yields
    assert harness.scheduler.state.num_preemptions == 1
    assert harness.scheduler.explain(first) == "waiting for 1 page that in-flight steps still use"
    assert harness.scheduler.requests[last].status.value == "preempted"
    harness.drain()


def test_with_a_step_in_flight_nobody_yields_for_more_than_is_missing() -> None:
    harness = Harness(num_pages=4, depth=2, threshold=8, admission="optimistic")
    first, last = harness.add([1] * 15, max_tokens=1), harness.add([2] * 4, max_tokens=4)
    harness.step()
    assert harness.kv.num_available == 1
    harness.step()  # the first needs two pages more; one is there, and the last has one
    assert harness.scheduler.state.num_preemptions == 1
    assert harness.scheduler.explain(first) == "waiting for 1 page that in-flight steps still use"
    assert harness.scheduler.requests[last].status.value == "preempted"
    harness.drain()


def test_with_a_step_in_flight_what_an_aborted_request_returns_is_enough() -> None:
    harness = Harness(num_pages=4, depth=2)
    first, last = (harness.add([n] * 8, max_tokens=8) for n in (1, 2))
    harness.step()
    harness.abort(last)
    harness.step()
    assert harness.scheduler.explain(first) == "waiting for 1 page that in-flight steps still use"
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 0
