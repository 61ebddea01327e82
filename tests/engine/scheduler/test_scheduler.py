"""Each behaviour of a step by name; see test_random_traces.py for all of them at once."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tokenmill.core.request import FinishReason


def test_a_request_alone_prefills_then_decodes_until_its_length() -> None:
    harness = Harness()
    harness.add([1, 2, 3, 4, 5], max_tokens=3)
    harness.drain()
    assert plans(harness) == [{"0": 5}, {"0": 1}, {"0": 1}]


def test_a_long_prompt_is_split_by_the_budget_while_others_decode_in_the_same_steps() -> None:
    harness = Harness(budget=8)
    harness.add([1, 2], max_tokens=6)
    harness.step()
    harness.add(list(range(20)), max_tokens=1)
    harness.drain()
    assert plans(harness)[:4] == [{"0": 2}, {"0": 1, "1": 7}, {"0": 1, "1": 7}, {"0": 1, "1": 6}]


def test_long_prefill_threshold_caps_one_request_and_leaves_budget_to_others() -> None:
    harness = Harness(budget=16, threshold=4)
    harness.add(list(range(10)), max_tokens=1)
    harness.add([7, 8, 9], max_tokens=1)
    harness.drain()
    assert plans(harness)[0] == {"0": 4, "1": 3}


def test_several_prompts_may_be_partly_computed_at_the_same_time() -> None:
    harness = Harness(budget=10, threshold=4, num_pages=20)
    for n in range(3):
        harness.add([n] * 9, max_tokens=1)
    harness.drain()
    assert plans(harness)[:3] == [{"0": 4, "1": 4, "2": 2}, {"0": 4, "1": 4, "2": 2}, {"0": 1, "1": 1, "2": 4}]


def test_without_chunked_prefill_a_long_head_is_not_overtaken() -> None:
    harness = Harness(budget=12, chunked=False, max_model_len=12)
    harness.add([1, 2, 3, 4, 5], max_tokens=2)
    harness.add(list(range(10)), max_tokens=1)
    harness.add([1], max_tokens=1)
    harness.drain()
    assert plans(harness)[0] == {"0": 5}
    assert plans(harness)[1] == {"0": 1, "1": 10, "2": 1}


def test_a_match_never_covers_the_whole_prompt() -> None:
    harness = Harness()
    harness.add(list(range(8)), max_tokens=1)
    harness.drain()
    again = harness.add(list(range(8)), max_tokens=1)
    harness.drain()
    assert harness.records[again].num_cached_tokens == 4


def test_salts_never_share() -> None:
    harness = Harness()
    harness.add(list(range(12)), max_tokens=1, salt="a")
    harness.drain()
    other = harness.add(list(range(12)), max_tokens=1, salt="b")
    same = harness.add(list(range(12)), max_tokens=1, salt="a")
    harness.drain()
    assert harness.records[other].num_cached_tokens == 0
    assert harness.records[same].num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_last_running_is_preempted_and_ends_with_the_same_tokens(depth: int) -> None:
    harness = Harness(num_pages=8, max_num_seqs=3, depth=depth)
    for n in range(3):
        harness.add([n * 10 + k for k in range(8)], max_tokens=12)
    harness.drain()
    assert harness.scheduler.state.num_preemptions > 0
    assert all(record.finish_reason is FinishReason.LENGTH for record in harness.records.values())


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    harness = Harness(num_pages=8, max_num_seqs=4)
    for n in range(4):
        harness.add([n * 10 + k for k in range(6)], max_tokens=14)
    before = 0
    while harness.engine.has_work:
        num_plans = len(harness.runner.plans)
        harness.step()
        if harness.scheduler.state.num_preemptions > before and len(harness.runner.plans) > num_plans:
            assert not harness.runner.plans[-1].new_rows
        before = harness.scheduler.state.num_preemptions
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_abort_at_any_moment_returns_row_and_pages(depth: int) -> None:
    for moment in range(8):
        harness = Harness(depth=depth, budget=8)
        ids = [harness.add(list(range(n, n + 10)), max_tokens=5) for n in range(3)]
        for _ in range(moment):
            harness.step()
        harness.abort(ids[1])
        harness.abort(ids[1], "no such id")
        harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_found_late_discards_what_was_launched_after_it(depth: int) -> None:
    eos = frozenset(range(0, 50, 3))
    harness = Harness(depth=depth, eos=eos)
    for n in range(6):
        harness.add([n, n + 1, n + 2], max_tokens=12)
    harness.drain()
    assert {record.finish_reason for record in harness.records.values()} >= {FinishReason.STOP}


def test_min_tokens_keeps_a_request_from_stopping_early() -> None:
    harness = Harness(eos=frozenset(range(50)))
    request_id = harness.add([1, 2], max_tokens=8, min_tokens=5)
    while harness.engine.has_work:
        harness.step()
    assert len(harness.records[request_id].tokens) == 6


def test_depths_give_identical_tokens_and_overlap_keeps_several_steps_launched() -> None:
    outputs = []
    for depth in (1, 2, 4):
        harness = Harness(depth=depth, num_pages=9)
        for n in range(5):
            harness.add([n % 2, 1, 2, 3, 4, n], max_tokens=9)
        harness.drain()
        outputs.append([record.tokens for record in harness.records.values()])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_ends_its_requests_and_no_others(depth: int) -> None:
    harness = Harness(depth=depth, max_num_seqs=2)
    first = [harness.add(list(range(n, n + 9)), max_tokens=6) for n in range(2)]
    waiting = harness.add(list(range(9)), max_tokens=3)
    harness.runner.failing_steps = {2}
    harness.drain()
    assert [harness.records[i].finish_reason for i in first] == [FinishReason.ERROR] * 2
    assert harness.records[waiting].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_pages_that_a_failed_step_wrote_are_never_found(depth: int) -> None:
    harness = Harness(depth=depth, max_num_seqs=1)
    ids = [harness.add(list(range(length)), max_tokens=2) for length in (20, 21)]
    harness.runner.failing_steps = {2}  # the second chunk: tokens 16 to 19
    harness.drain()
    assert harness.records[ids[0]].finish_reason is FinishReason.ERROR
    assert harness.records[ids[1]].num_cached_tokens == 16


def test_a_prompt_without_room_is_refused_with_one_sentence() -> None:
    harness = Harness(max_model_len=16)
    request_id = harness.add(list(range(16)))
    assert harness.records[request_id].finish_reason is FinishReason.ERROR
    assert not harness.engine.has_work


def test_max_tokens_is_capped_by_the_context() -> None:
    harness = Harness(max_model_len=16)
    request_id = harness.add(list(range(10)), max_tokens=100)
    harness.drain()
    assert len(harness.records[request_id].tokens) == 6


def test_the_same_arrivals_give_the_same_plans() -> None:
    def run() -> list[dict[str, int]]:
        harness = Harness(num_pages=9, budget=10)
        for n in range(6):
            harness.add([n, 1, 2, 3, 4, 5, 6], max_tokens=7)
            harness.step()
        harness.drain()
        return plans(harness)

    assert run() == run()


def test_with_overlap_a_failed_step_neither_looks_idle_nor_stuck_nor_ends_a_paused_session() -> None:
    harness = Harness(depth=2, max_num_seqs=2)
    session = harness.open_session([1, 2, 3], max_tokens=2)
    harness.add([9, 8, 7, 6], max_tokens=9)
    waiting = harness.add([5, 5, 5], max_tokens=3)
    harness.runner.failing_steps = {4}
    harness.drain()
    assert harness.records[session].finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
    assert harness.records[waiting].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [2, 4])
def test_with_steps_in_flight_a_short_request_waits_for_returning_pages_instead_of_preempting_more(depth: int) -> None:
    harness = Harness(num_pages=9, max_num_seqs=4, depth=depth)
    for n in range(4):
        harness.add([n * 10 + k for k in range(7)], max_tokens=12)
    reasons = set()
    while harness.engine.has_work:
        harness.step()
        reasons |= {request.wait_reason for request in harness.scheduler.state.running}
    assert any("that in-flight steps still use" in reason for reason in reasons)
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_never_past_max_tokens_however_many_steps_are_in_flight(depth: int) -> None:
    harness = Harness(depth=depth)
    ids = [harness.add([n, 1, 2], max_tokens=n + 1) for n in range(5)]
    harness.drain()
    assert [len(harness.records[i].tokens) for i in ids] == [1, 2, 3, 4, 5]
    computed = dict.fromkeys(ids, 0)
    for plan in harness.runner.plans:
        for request_id, end in zip(plan.request_ids, plan.num_computed + plan.num_scheduled, strict=True):
            computed[request_id] = max(computed[request_id], int(end))
    assert [computed[i] for i in ids] == [3, 4, 5, 6, 7], "no step ran for a token that could not follow"
