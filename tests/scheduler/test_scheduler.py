"""Each behaviour of the scheduler by name; see test_random_traces.py for all of them at once."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import Harness
from tokenmill.request import FinishReason, RequestStatus


def plans(harness: Harness) -> list[dict[str, int]]:
    """Each launched step as {request id: tokens}."""
    return [dict(zip(plan.request_ids, plan.num_scheduled.tolist(), strict=True)) for plan in harness.runner.plans]


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


def test_without_chunked_prefill_a_long_head_is_not_overtaken() -> None:
    harness = Harness(budget=12, chunked=False, max_model_len=12)
    harness.add([1, 2, 3, 4, 5], max_tokens=2)
    harness.add(list(range(10)), max_tokens=1)
    harness.add([1], max_tokens=1)
    harness.drain()
    assert plans(harness)[0] == {"0": 5}
    assert plans(harness)[1] == {"0": 1, "1": 10, "2": 1}


def test_rows_limit_how_many_run_and_the_reason_is_given() -> None:
    harness = Harness(max_num_seqs=2)
    ids = [harness.add([n, n + 1], max_tokens=3) for n in range(3)]
    harness.step()
    assert harness.scheduler.num_running == 2
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


def test_the_last_running_is_preempted_and_ends_with_the_same_tokens() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    for n in range(3):
        harness.add([n * 10 + k for k in range(8)], max_tokens=12)
    harness.drain()
    assert harness.scheduler.books.num_preemptions > 0
    assert all(record.finish_reason is FinishReason.LENGTH for record in harness.records.values())


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    harness = Harness(num_pages=8, max_num_seqs=4)
    for n in range(4):
        harness.add([n * 10 + k for k in range(6)], max_tokens=14)
    before = 0
    while harness.engine.has_work:
        num_plans = len(harness.runner.plans)
        harness.step()
        if harness.scheduler.books.num_preemptions > before and len(harness.runner.plans) > num_plans:
            assert not harness.runner.plans[-1].new_rows
        before = harness.scheduler.books.num_preemptions
    harness.drain()


def test_priority_goes_first_and_the_worst_is_the_victim() -> None:
    harness = Harness(policy="priority", num_pages=6, max_num_seqs=2)
    low = harness.add([1, 2, 3, 4, 5], max_tokens=14, priority=5)
    harness.step()
    high = harness.add([9, 8, 7, 6, 5], max_tokens=14, priority=-1)
    harness.drain()
    assert harness.scheduler.books.num_preemptions > 0
    order = [request_id for plan in plans(harness) for request_id in plan]
    assert max(i for i, r in enumerate(order) if r == high) < max(i for i, r in enumerate(order) if r == low)


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
    assert harness.records[waiting].num_cached_tokens <= 8, "only pages of committed steps are matchable"


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


def test_hits_are_counted_once_per_admission_and_again_after_a_preemption() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    for n in range(3):
        harness.add([n * 10 + k for k in range(8)], max_tokens=12)
    harness.drain()
    admissions = sum(len(plan.new_rows) for plan in harness.runner.plans)
    assert admissions == 3 + harness.scheduler.books.num_preemptions
    queried = sum(len(row.token_ids) for plan in harness.runner.plans for row in plan.new_rows)
    assert harness.kv.num_queried_tokens == queried


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


def test_a_request_behind_others_is_told_how_many_and_why_the_first_waits() -> None:
    harness = Harness(max_num_seqs=1)
    ids = [harness.add([n, 1, 2], max_tokens=5) for n in range(3)]
    assert harness.scheduler.explain(ids[0]) == "has just arrived"
    assert harness.scheduler.explain(ids[2]) == "2 ahead of it; the first has just arrived"
    harness.step()
    assert harness.scheduler.explain(ids[0]) == "", "it runs"
    assert harness.scheduler.explain(ids[1]) == "needs a row, all 1 are in use"
    assert harness.scheduler.explain(ids[2]) == "1 ahead of it; the first needs a row, all 1 are in use"
    harness.drain()


def test_the_reasons_name_pages_and_budget() -> None:
    harness = Harness(num_pages=8, budget=16)
    harness.add(list(range(16)), max_tokens=10)
    big, small = harness.add([40] * 17, max_tokens=2), harness.add([41, 42, 43], max_tokens=2)
    harness.step()
    harness.step()
    assert harness.scheduler.explain(big) == "needs 4 pages, 3 are free or evictable"
    assert harness.scheduler.explain(small).startswith("1 ahead of it; the first needs 4 pages")
    harness.drain()


def test_no_row_is_taken_and_no_page_held_while_a_request_waits() -> None:
    harness = Harness(num_pages=8, budget=16)
    harness.add(list(range(16)), max_tokens=10)
    harness.add([40] * 17, max_tokens=2)
    harness.step()
    before = harness.kv.num_available
    harness.step()
    assert harness.kv.num_available in (before, before - 1), "only the running request may have taken a page"
    assert harness.scheduler.books.rows.num_free == 3
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_of_one_token_answers_runs_in_two_steps(depth: int) -> None:
    harness = Harness(num_pages=30, max_num_seqs=8, budget=64, depth=depth)
    for _ in range(8):
        harness.add(list(range(9)), max_tokens=1, group="g")
    harness.drain()
    assert len(harness.runner.plans) == 2, "one computes the prompt, the others share it"


def test_what_a_preempted_request_finds_again_of_its_own_is_not_called_cached() -> None:
    harness = Harness(num_pages=8, max_num_seqs=3)
    for n in range(3):
        harness.add([n * 10, n * 10 + 1, n * 10 + 2], max_tokens=20)
    harness.drain()
    assert harness.scheduler.books.num_preemptions > 0
    assert [record.num_cached_tokens for record in harness.records.values()] == [0, 0, 0]


def test_a_request_that_found_the_budget_used_up_is_told_so() -> None:
    harness = Harness(budget=8)
    harness.add(list(range(30)), max_tokens=1)
    other = harness.add([1, 2], max_tokens=1)
    harness.step()
    assert harness.scheduler.explain(other) == "the token budget of the step is used up"
    harness.drain()


def test_waiting_requests_that_only_lack_room_are_counted_apart() -> None:
    harness = Harness(max_num_seqs=1, num_pages=20, budget=4)
    harness.add([1, 2], max_tokens=2, status=RequestStatus.WAITING_FOR_GRAMMAR)
    for _ in range(3):
        harness.add(list(range(9)), max_tokens=2, group="g")
    harness.add([3, 4], max_tokens=2)
    harness.step()
    assert (harness.engine.stats().num_waiting, harness.engine.stats().num_queued) == (4, 1)
    harness.scheduler.wake("0")
    harness.drain()


def test_with_overlap_a_failed_step_neither_looks_idle_nor_stuck_nor_ends_a_paused_session() -> None:
    harness = Harness(depth=2, max_num_seqs=2)
    session = harness.open_session([1, 2, 3], max_tokens=2)
    harness.add([9, 8, 7, 6], max_tokens=9)
    waiting = harness.add([5, 5, 5], max_tokens=3)
    harness.runner.failing_steps = {4}
    harness.drain()
    assert harness.records[session].finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
    assert harness.records[waiting].finish_reason is FinishReason.LENGTH
