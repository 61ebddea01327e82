"""Sessions: requests that wait for further input at the end of a turn."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.harness import Harness
from tokenmill.core.request import FinishReason
from tokenmill.engine.scheduler.sessions import MAX_QUEUED_INPUTS
from tokenmill.lab.conformance.memory_runner import expected_output


def run_turn(harness: Harness) -> None:
    while harness.engine.has_work:
        harness.step()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_further_input_continues_from_the_computed_tokens_and_drops_the_last_one(depth: int) -> None:
    harness = Harness(depth=depth)
    session = harness.open_session([1, 2, 3, 4, 5], max_tokens=3)
    run_turn(harness)
    first = harness.records[session].tokens
    assert harness.extend(session, [6, 7], max_tokens=4)
    run_turn(harness)
    resumed = next(row for plan in harness.runner.plans[1:] for row in plan.new_rows)
    assert resumed.token_ids.tolist() == [1, 2, 3, 4, 5, *first[:-1], 6, 7]
    start = next(plan for plan in harness.runner.plans[1:] if plan.new_rows)
    assert (start.num_computed.tolist(), start.num_scheduled.tolist()) == ([7], [2]), "computed tokens are kept"
    harness.drain()


def test_a_paused_session_keeps_its_row_and_pages_while_others_run() -> None:
    harness = Harness(max_num_seqs=2)
    session = harness.open_session([1, 2, 3, 4, 5], max_tokens=3)
    run_turn(harness)
    assert (harness.scheduler.state.rows.num_free, harness.kv.num_pinned) == (1, 2)
    assert harness.scheduler.explain(session) == "waiting for the next input of its session"
    harness.add([9, 8, 7], max_tokens=3)
    run_turn(harness)
    assert harness.extend(session, [6], max_tokens=2)
    harness.drain()


def test_the_last_input_ends_the_session() -> None:
    harness = Harness()
    session = harness.open_session([1, 2, 3], max_tokens=2)
    run_turn(harness)
    assert harness.extend(session, [4], max_tokens=2, is_last=True)
    run_turn(harness)
    assert session not in harness.scheduler.requests
    assert not harness.extend(session, [5], max_tokens=1)
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_input_that_comes_while_a_turn_runs_is_taken_when_it_ends(depth: int) -> None:
    harness = Harness(depth=depth)
    session = harness.open_session([1, 2, 3], max_tokens=5)
    harness.step()
    assert harness.extend(session, [4], max_tokens=3)
    assert harness.extend(session, [5, 6], max_tokens=2, is_last=True)
    assert not harness.extend(session, [7], max_tokens=2), "the session ends with the input before"
    run_turn(harness)
    lengths = [len(turn.tokens) for turn in (*harness.sessions[session], harness.records[session])]
    assert lengths == [5, 3, 2]
    assert session not in harness.scheduler.requests
    harness.drain()


def test_a_session_takes_as_many_inputs_ahead_as_it_is_said_and_no_more() -> None:
    harness = Harness(num_pages=40, max_model_len=100)
    session = harness.open_session([1, 2, 3], max_tokens=5)
    harness.step()
    taken = [harness.extend(session, [n], max_tokens=1) for n in range(MAX_QUEUED_INPUTS + 2)]
    assert taken == [True] * MAX_QUEUED_INPUTS + [False] * 2
    run_turn(harness)
    assert harness.extend(session, [4], max_tokens=1)
    harness.drain()


def test_an_input_that_has_no_room_left_when_its_turn_comes_ends_the_session_and_says_so() -> None:
    harness = Harness(max_model_len=16)
    session = harness.open_session([1, 2, 3], max_tokens=10)
    harness.step()
    assert harness.extend(session, [4] * 6, max_tokens=2)
    outputs = []
    while harness.engine.has_work:
        outputs += harness.engine.step()
    assert outputs[-1].error == "18 tokens with this input; the context holds 16"
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH, FinishReason.ERROR]
    assert (harness.kv.num_pinned, harness.scheduler.requests) == (0, {})


def test_an_aborted_session_forgets_its_inputs() -> None:
    harness = Harness()
    session = harness.open_session([1, 2, 3], max_tokens=5)
    harness.step()
    assert harness.extend(session, [4], max_tokens=3)
    harness.abort(session)
    harness.drain()
    assert len(harness.runner.plans) == 1


def test_input_beyond_the_context_is_refused() -> None:
    harness = Harness(max_model_len=16)
    session = harness.open_session([1, 2, 3], max_tokens=5)
    harness.step()
    assert not harness.extend(session, list(range(14)), max_tokens=2), "not even if the turn ended now"
    run_turn(harness)
    assert not harness.extend(session, list(range(10)), max_tokens=1)
    assert harness.extend(session, [4], max_tokens=1)
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_session_can_be_preempted_and_a_paused_one_aborted(depth: int) -> None:
    harness = Harness(depth=depth, num_pages=8, max_num_seqs=3)
    session = harness.open_session([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=8)
    for n in range(2):
        harness.add([n * 10 + k for k in range(8)], max_tokens=12)
    run_turn(harness)
    harness.abort(session)
    assert harness.records[session].finish_reason is FinishReason.ABORT
    harness.drain()
    assert harness.scheduler.state.num_preemptions > 0


def test_an_idle_session_yields_its_pages_rather_than_let_others_wait_for_ever() -> None:
    harness = Harness(num_pages=8, max_num_seqs=1)
    session = harness.open_session([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=8)
    run_turn(harness)
    harness.add([20 + k for k in range(10)], max_tokens=12)
    run_turn(harness)
    assert harness.scheduler.requests[session].row is None
    assert harness.extend(session, [9, 9], max_tokens=3)
    harness.drain()


def test_without_chunked_prefill_a_further_input_runs_whole_or_waits() -> None:
    harness = Harness(budget=13, chunked=False, max_model_len=24, num_pages=20)
    session = harness.open_session([1, 2, 3], max_tokens=2)
    run_turn(harness)
    harness.add([9, 8, 7, 6, 5, 4], max_tokens=3)
    assert harness.extend(session, [4] * 8, max_tokens=2)
    harness.step()
    assert dict(zip(harness.runner.plans[-1].request_ids, harness.runner.plans[-1].num_scheduled, strict=True)) == {
        session: 8
    }, "the session's arrival is older; the other prompt waits for the budget of the next step"
    harness.drain()


def test_a_further_input_that_exceeds_what_is_left_of_a_step_says_so() -> None:
    harness = Harness(budget=13, chunked=False, max_model_len=24, num_pages=20, policy="priority")
    session = harness.open_session([1, 2, 3], max_tokens=2)
    run_turn(harness)
    harness.add([9, 8, 7, 6, 5, 4], max_tokens=3, priority=-1)
    assert harness.extend(session, [4] * 8, max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(session) == "needs 8 tokens of a step's budget, 7 are left"
    harness.drain()


def test_a_session_that_lacks_pages_for_its_input_says_so_and_waits() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3, budget=32)
    session = harness.open_session([1, 2, 3, 4, 5, 6], max_tokens=2)
    run_turn(harness)
    harness.add([20 + k for k in range(16)], max_tokens=4)
    harness.step()
    assert harness.extend(session, [7] * 10, max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(session) == "needs 3 more pages, 1 is free or evictable"
    harness.drain()


def test_a_session_that_holds_twice_what_the_cache_has_gives_it_up_rather_than_wait_for_itself() -> None:
    harness = Harness(num_pages=9, page_size=2, max_num_seqs=1, budget=5, max_model_len=18, admission="reserve")
    harness.add([0, 0], max_tokens=1)
    session = harness.open_session([0, 0], max_tokens=3)
    run_turn(harness)
    assert harness.extend(session, [0] * 12, max_tokens=1)
    harness.drain()


def test_an_input_longer_than_a_steps_budget_runs_in_chunks_on_top_of_what_is_computed() -> None:
    harness = Harness(budget=5, num_pages=20)
    session = harness.open_session([1, 2, 3], max_tokens=2)
    run_turn(harness)
    assert harness.extend(session, [4] * 8, max_tokens=2)
    before = len(harness.runner.plans)
    run_turn(harness)
    turn = harness.runner.plans[before:]
    assert [(int(plan.num_computed[0]), int(plan.num_scheduled[0])) for plan in turn] == [(4, 5), (9, 3), (12, 1)]
    assert [len(plan.new_rows) for plan in turn] == [1, 0, 0]
    harness.drain()


def test_with_a_step_launched_nothing_is_stuck_and_a_paused_session_is_no_work() -> None:
    harness = Harness(depth=2)
    session = harness.open_session([1, 2, 3], max_tokens=1)
    harness.step()
    assert harness.scheduler.in_flight
    assert not harness.scheduler.is_stuck
    run_turn(harness)
    assert not harness.engine.has_work
    assert session in harness.scheduler.requests
    harness.drain()


@pytest.mark.parametrize("depth", [2, 4])
def test_a_session_outlives_a_step_that_fails_behind_its_turn(depth: int) -> None:
    """The step knew not that the turn had ended, and took a page for it of which the runner never heard."""
    num_outlived = 0
    for failing in range(1, 12):
        harness = Harness(depth=depth, page_size=1, num_pages=40, eos=frozenset(expected_output([1, 2, 3], 3)[2:]))
        harness.runner.failing_steps.add(failing)
        session = harness.open_session([1, 2, 3], max_tokens=9)
        run_turn(harness)
        has_failed = failing in [plan.step for plan in harness.runner.plans]
        if has_failed and harness.records[session].finish_reason is FinishReason.STOP:
            num_outlived += 1
            assert harness.extend(session, [6, 7], max_tokens=5)
            run_turn(harness)
            assert harness.records[session].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        harness.drain()
    assert num_outlived == depth - 1
