"""Follow a request whose KV is elsewhere through every state, one event at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.scheduler.harness import Settings
from tests.engine.transfer.fake_source import PATIENCE, FakeSource, TransferHarness
from tests.seeding import seed_for
from tokenmill.core.request import CacheKey, FinishReason, RequestStatus
from tokenmill.engine.loop.step_log import read_log
from tokenmill.engine.transfer.orders import PageLoad
from tokenmill.engine.transfer.protocol import Answer
from tokenmill.lab.simulate.policies import compare
from tokenmill.lab.simulate.replay import replay

SEED = seed_for(__name__)
PROMPT = [7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
KEY = CacheKey()


class Stubborn:
    """A source's method in the hands of a test: loads are kept until the test goes on with them."""

    def __init__(self, source: FakeSource) -> None:
        self.loads: list[PageLoad] = []
        source.load = self.loads.append  # type: ignore[method-assign]


def make_harness(policy: str = "recompute", **settings: Any) -> TransferHarness:
    return TransferHarness(Settings(**settings), random.Random(SEED), trouble=0.0, policy=policy)


def run(harness: TransferHarness) -> None:
    while harness.engine.has_work:
        harness.step()


def status_of(harness: TransferHarness, request_id: str) -> RequestStatus:
    return harness.scheduler.requests[request_id].status


def fill(harness: TransferHarness, load: PageLoad, *numbers: int) -> None:
    for number in numbers:
        end = (load.order.first_page + number + 1) * harness.settings.page_size
        page = harness.sources[0].pages[load.cache_key, load.tokens[:end].tobytes()]
        assert load.fill(number, memoryview(page))


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_peer_has_is_loaded_and_only_the_rest_is_run(depth: int) -> None:
    harness = make_harness(depth=depth)
    harness.sources[0].put(KEY, PROMPT)
    request_id = harness.add(PROMPT, max_tokens=3)
    run(harness)
    assert harness.runner.plans[0].num_computed.tolist() == [12]
    assert harness.runner.plans[0].num_scheduled.tolist() == [2]
    assert harness.records[request_id].num_cached_tokens == 12
    harness.drain()


def test_cached_tokens_are_told_by_where_they_came_from() -> None:
    harness = make_harness()
    first = harness.add(PROMPT[:6], max_tokens=1)
    harness.drain()
    harness.sources[0].put(KEY, PROMPT)
    second, third = harness.add(PROMPT, max_tokens=2), harness.add(PROMPT, max_tokens=2)
    run(harness)
    harness.drain()
    told = [harness.records[one] for one in (first, second, third)]
    assert [(one.num_cached_tokens, one.num_external_cached_tokens) for one in told] == [(0, 0), (12, 8), (12, 0)]


def test_a_full_hit_leaves_the_last_token_to_run() -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT[:12])
    harness.add(PROMPT[:12], max_tokens=2)
    run(harness)
    assert (harness.runner.plans[0].num_computed.tolist(), harness.runner.plans[0].num_scheduled.tolist()) == ([8], [4])
    harness.drain()


def test_nothing_is_loaded_that_the_engine_has_itself() -> None:
    harness = make_harness()
    harness.add(PROMPT, max_tokens=1)
    run(harness)
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert stubborn.loads == []
    harness.drain()


def test_while_pages_come_they_are_nobody_elses_and_match_nothing() -> None:
    harness = make_harness(num_pages=12)
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    first = harness.add(PROMPT, max_tokens=2)
    harness.step()
    (load,) = stubborn.loads
    assert status_of(harness, first) is RequestStatus.WAITING_FOR_REMOTE_KV
    assert harness.kv.num_pinned == 3
    second = harness.add(PROMPT, max_tokens=2)
    harness.step()
    assert "same prompt" in harness.scheduler.explain(second), "it waits for the first one's pages, and loads none"
    assert harness.runner.plans == []
    fill(harness, load, 0, 1, 2)
    load.finish()
    run(harness)
    assert len(stubborn.loads) == 1
    assert [harness.records[one].num_cached_tokens for one in (first, second)] == [12, 12]
    harness.drain()


@pytest.mark.parametrize(("filled", "cached"), [([], 0), ([0], 4), ([1, 2], 0), ([0, 2], 4)])
def test_a_load_that_fails_is_cut_off_at_the_first_bad_page_and_the_rest_is_computed(
    filled: list[int], cached: int
) -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    request_id = harness.add(PROMPT, max_tokens=2)
    harness.step()
    fill(harness, stubborn.loads[0], *filled)
    stubborn.loads[0].finish()
    run(harness)
    assert harness.records[request_id].num_cached_tokens == cached
    assert harness.records[request_id].finish_reason is FinishReason.LENGTH
    harness.drain()


def test_with_the_policy_fail_a_load_that_fails_ends_its_request_and_no_other() -> None:
    harness = make_harness(policy="fail")
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    request_id, other = harness.add(PROMPT, max_tokens=2), harness.add([3, 3, 3], max_tokens=2)
    harness.step()
    fill(harness, stubborn.loads[0], 0)
    stubborn.loads[0].finish()
    run(harness)
    assert harness.records[request_id].finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
    assert harness.records[other].finish_reason is FinishReason.LENGTH
    harness.drain()


def test_a_load_that_never_ends_is_given_up_in_time_and_touches_no_page_any_more() -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    request_id = harness.add(PROMPT, max_tokens=2)
    harness.step()
    fill(harness, stubborn.loads[0], 0)
    for _ in range(int(PATIENCE.load) - 1):
        harness.step()
    assert status_of(harness, request_id) is RequestStatus.WAITING_FOR_REMOTE_KV
    harness.step()
    assert not stubborn.loads[0].fill(1, memoryview(bytes(32)))
    stubborn.loads[0].finish()
    run(harness)
    assert harness.records[request_id].num_cached_tokens == 4
    harness.drain()


def test_a_source_that_never_answers_is_not_waited_for_for_ever() -> None:
    harness = make_harness()
    harness.sources[0].lookup = lambda query, params: harness.sources[0].known.setdefault(query.request_id)  # type: ignore[method-assign]
    request_id = harness.add(PROMPT, max_tokens=2)
    harness.step()
    assert harness.scheduler.explain(request_id) == "waiting for KV sources to look up its prompt"
    run(harness)
    assert harness.turn >= PATIENCE.lookup
    harness.drain()


def test_later_is_asked_again_and_others_run_meanwhile() -> None:
    harness = make_harness()
    answers: list[Answer | None] = [None, None, Answer(8)]
    source = harness.sources[0]
    source.put(KEY, PROMPT)

    def lookup(query: Any, params: Any) -> Answer | None:
        source.known[query.request_id] = None
        return answers.pop(0) if query.request_id == "0" else Answer()

    source.lookup = lookup  # type: ignore[method-assign]
    first = harness.add(PROMPT, max_tokens=2)
    harness.add([5, 5, 5], max_tokens=6)
    run(harness)
    assert harness.runner.plans[0].request_ids == ("1",)
    assert harness.records[first].num_cached_tokens == 8
    harness.drain()


@pytest.mark.parametrize("preempt", [False, True])
def test_an_abort_or_a_reset_while_pages_come_takes_them_back_at_once(preempt: bool) -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    stubborn = Stubborn(harness.sources[0])
    request_id = harness.add(PROMPT, max_tokens=2)
    harness.step()
    if preempt:
        assert not harness.engine.reset_prefix_cache()
        assert harness.engine.reset_prefix_cache(preempt_running=True)
    else:
        harness.abort(request_id)
    assert harness.kv.num_pinned == 0
    assert not stubborn.loads[0].fill(0, memoryview(bytes(32)))
    run(harness)
    harness.drain()


@pytest.mark.parametrize("reset_external", [False, True])
def test_a_reset_leaves_what_is_stored_elsewhere_unless_it_is_told_otherwise(reset_external: bool) -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    for _ in range(2):
        request_id = harness.add(PROMPT, max_tokens=2)
        run(harness)
        assert harness.engine.reset_prefix_cache(reset_external=reset_external)
    assert harness.records[request_id].num_cached_tokens == (0 if reset_external else 12)


def test_pages_that_were_just_to_be_saved_are_not_in_the_way_of_a_reset() -> None:
    harness = make_harness()
    harness.add(PROMPT, max_tokens=2)
    while harness.scheduler.requests:
        harness.step()
    assert harness.kv.num_pinned > 0, "no plan has ordered the save yet"
    assert harness.engine.reset_prefix_cache()
    harness.scheduler.check_invariants()
    assert harness.kv.num_available == harness.kv.pool.num_usable


def test_a_reset_that_is_refused_leaves_what_is_stored_elsewhere() -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    harness.add([1, 2, 3], max_tokens=2)
    harness.step()
    assert not harness.engine.reset_prefix_cache(reset_external=True)
    run(harness)
    request_id = harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert harness.records[request_id].num_cached_tokens == 12


def test_an_id_may_come_again_right_after_its_load_was_aborted() -> None:
    harness = make_harness()
    harness.sources[0].put(KEY, PROMPT)
    Stubborn(harness.sources[0])
    request_id = harness.add(PROMPT, max_tokens=2)
    harness.step()
    harness.abort(request_id)
    harness.records.clear()
    assert harness.add(PROMPT, max_tokens=2) == request_id
    run(harness)
    harness.drain()


def test_a_producers_pages_stay_until_they_are_released_and_the_reply_says_where() -> None:
    harness = make_harness(num_pages=8)
    source = harness.sources[0]
    source.poll = list  # type: ignore[method-assign, assignment]
    outputs = []
    harness.add(PROMPT, max_tokens=1, kv_transfer_params={"keep": True})
    for _ in range(4):
        outputs += harness.engine.step()
    (last,) = [output for output in outputs if output.finish_reason is not None]
    assert last.kv_transfer_params is not None
    assert last.kv_transfer_params["num_tokens"] == 12
    assert harness.kv.num_pinned == 3
    assert not harness.engine.reset_prefix_cache(), "somebody outside reads them"
    source.poll = lambda: [last.kv_transfer_params["kept"]]  # type: ignore[method-assign, index]
    harness.engine.step()
    assert harness.kv.num_pinned == 0


def test_a_lease_that_nobody_ends_ends_by_itself() -> None:
    harness = make_harness()
    harness.sources[0].poll = list  # type: ignore[method-assign, assignment]
    harness.add(PROMPT, max_tokens=1, kv_transfer_params={"keep": True})
    for _ in range(4):
        harness.step()
    assert harness.kv.num_pinned == 3
    assert harness.engine.has_work, "the engine must come back to hear of it"
    harness.drain()
    assert harness.sources[0].counts["expired"] == 1


def test_bad_parameters_are_refused_and_leave_nothing_behind() -> None:
    harness = make_harness()
    request_id = harness.add(PROMPT, kv_transfer_params={"bad": 1})
    assert harness.records[request_id].finish_reason is FinishReason.ERROR
    assert not harness.engine.has_work


def test_what_is_evicted_was_stored_before_and_comes_back() -> None:
    harness = make_harness(num_pages=8)
    harness.add(PROMPT, max_tokens=2)
    run(harness)
    for first in range(3, 7):
        harness.add([first] * 14, max_tokens=2)
        run(harness)
    assert not len(harness.kv.cache.peek(KEY, np.array(PROMPT, dtype=np.int32)))
    again = harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert harness.records[again].num_cached_tokens == 12
    assert harness.sources[1].counts["loaded"] >= 1
    harness.drain()


def test_a_parked_session_finds_its_pages_again() -> None:
    harness = make_harness(num_pages=8, max_num_seqs=1)
    session = harness.open_session(PROMPT[:8], max_tokens=8)
    run(harness)
    harness.add([20 + k for k in range(10)], max_tokens=12)
    run(harness)
    assert harness.scheduler.requests[session].row is None
    harness.add([40 + k for k in range(9)], max_tokens=12)
    run(harness)
    before = len(harness.runner.plans)
    assert harness.extend(session, [9, 9], max_tokens=3)
    run(harness)
    assert harness.runner.plans[before].num_computed.tolist() == [12], "15 tokens before, 3 pages of them were full"
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("trouble", [0.0, 0.3])
@pytest.mark.parametrize("slots", [0, 12])
def test_a_log_replays_without_any_source(tmp_path: Path, depth: int, trouble: float, slots: int) -> None:
    generator = random.Random(SEED)
    settings = Settings(14, budget=10, depth=depth, policy="fair", log=tmp_path / "log", state_slots=slots)
    harness = TransferHarness(settings, generator, trouble)
    harness.runner.failing_steps = {15}
    for number in range(60):
        prompt = [generator.randrange(3) for _ in range(generator.randint(1, 22))]
        if number % 3 == 0:
            harness.sources[0].put(KEY, prompt)
        harness.add(prompt, generator.randint(1, 9), kv_transfer_params={"keep": number % 4 == 0})
        if number % 10 == 4:
            harness.open_session(prompt, 3)
        if number == 30:
            harness.engine.reset_prefix_cache(preempt_running=True)
        for _ in range(generator.randint(0, 4)):
            harness.step()
        for session in harness.sessions:
            harness.extend(session, [1, 2], 2, is_last=number > 50)
        if number % 7 == 0:
            harness.abort(str(generator.randrange(number + 1)))
    harness.drain()
    harness.engine.close()
    counts = {name: sum(source.counts[name] for source in harness.sources) for name in harness.sources[0].counts}
    assert counts["loaded"] and counts["saved"] and counts["kept"], (SEED, counts)
    assert not slots or (counts["states"] and counts["kept states"]), (SEED, counts)
    assert not trouble or (counts["lost"] and counts["later"]), (SEED, counts)
    outcome = replay(tmp_path / "log")
    assert outcome.difference is None, f"seed {SEED}"
    assert outcome.num_plans == sum(record.plan is not None for record in read_log(tmp_path / "log")[1])


def test_a_source_that_raises_finds_loads_and_stores_nothing_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("this source is broken")

    harness = make_harness()
    peer, store = harness.sources
    peer.put(KEY, PROMPT)
    peer.load = broken  # type: ignore[method-assign]
    store.lookup = store.save = broken  # type: ignore[method-assign]
    store.forget = lambda request_id: None  # type: ignore[method-assign]
    request_id = harness.add(PROMPT, max_tokens=4)
    run(harness)
    assert harness.records[request_id].finish_reason is FinishReason.LENGTH
    assert harness.records[request_id].num_cached_tokens == 0
    for what in ("look up", "load", "take pages"):
        assert f"failed to {what}" in caplog.text
    harness.drain()


def test_what_other_policies_would_have_done_is_told_as_if_all_had_been_computed(tmp_path: Path) -> None:
    settings = Settings(num_pages=14, log=tmp_path / "log")
    harness = TransferHarness(settings, random.Random(SEED), trouble=0.0)
    for number in range(12):
        prompt = [number % 3] * 14
        harness.sources[0].put(KEY, prompt)
        harness.add(prompt, max_tokens=3)
        harness.step()
    harness.drain()
    harness.engine.close()
    own, other = compare(tmp_path / "log", [{"policy": "priority"}])
    assert len(own.end) == len(other.end) == 12
    assert own.num_tokens > sum(plan.num_tokens for plan in harness.runner.plans)
