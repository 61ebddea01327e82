"""Recurrent states in the schedule: where they are kept, what begins with them, and random traces of all of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.scheduler.drafters import KnowingDrafter
from tests.engine.scheduler.harness import Harness, Settings, plans
from tests.engine.scheduler.test_late_samples import LateRunner
from tests.engine.scheduler.test_random_traces import SchedulerTrace
from tests.tiers import scaled
from tokenmill.core.request import CacheKey, Request, TokenArray
from tokenmill.engine.scheduler.resources.state_slots import StateSlots
from tokenmill.lab.conformance.memory_runner import expected_output


def harness_of(**overrides: object) -> Harness:
    defaults = {"num_pages": 40, "max_model_len": 64, "budget": 32, "state_slots": 12}
    return Harness(Settings(**{**defaults, **overrides}))  # type: ignore[arg-type]


def saves(harness: Harness) -> list[tuple[str, int]]:
    """Return the requests whose state was kept, and behind how many tokens, in order."""
    found = []
    for plan in harness.runner.plans:
        if plan.states is not None:
            names = dict(zip(plan.rows.tolist(), plan.request_ids, strict=True))
            ends = zip(plan.states.save_rows.tolist(), plan.states.save_ends.tolist(), strict=True)
            found += [(names[row], end) for row, end in ends]
    return found


def cached(harness: Harness, *ids: str) -> list[int]:
    return [harness.records[request_id].num_cached_tokens for request_id in ids]


def test_a_prompt_leaves_its_state_at_its_last_full_page() -> None:
    harness = harness_of()
    prompt = list(range(18))
    first = harness.add(prompt)
    harness.drain()
    assert saves(harness) == [(first, 16)]
    again = harness.add(prompt)
    harness.drain()
    assert cached(harness, first, again) == [0, 16]


def test_a_prefix_without_a_state_is_no_hit_but_the_second_request_leaves_one_there() -> None:
    harness = harness_of()
    common = list(range(9))
    ids = []
    for last in (20, 30, 40):
        ids.append(harness.add([*common, *range(last, last + 8)]))
        harness.drain()
    # The second one leaves the cache behind 8 tokens: it finds no state there, and keeps one.
    assert saves(harness)[:3] == [("0", 16), ("1", 8), ("1", 16)]
    assert cached(harness, *ids) == [0, 0, 8]
    assert plans(harness)[4] == {"1": 8}, "a step keeps one state of a request"


def test_equal_prompts_in_flight_are_computed_once() -> None:
    harness = harness_of()
    ids = [harness.add(list(range(14)), 4) for _ in range(3)]
    harness.drain()
    assert cached(harness, *ids) == [0, 12, 12]


def test_who_shares_less_waits_for_a_state_where_they_part() -> None:
    harness = harness_of(threshold=8)
    first = harness.add(list(range(28)), 2)
    second = harness.add([*range(20), 40, 41, 42, 43, 44], 2)
    harness.drain()
    assert (first, 20) in saves(harness)
    assert cached(harness, second) == [20]


def test_a_text_leaves_its_newest_state_alone() -> None:
    harness = Harness(Settings(num_pages=80, page_size=4, max_model_len=256, budget=64, state_slots=8))
    first = harness.add([1, 2, 3, 4, 5], 200)
    harness.drain()
    assert saves(harness) == [(first, 4), (first, 64), (first, 128), (first, 192)]
    states = harness.scheduler.resource(StateSlots)
    assert states is not None
    assert states.num_kept == 2, "that of its prompt, and the newest"
    record = harness.records[first]
    more = harness.add([*record.prompt, *record.tokens], 4)
    harness.drain()
    assert cached(harness, more) == [192]


def test_a_request_takes_the_state_that_nobody_used_for_longest() -> None:
    harness = Harness(Settings(max_num_seqs=1, state_slots=2, num_pages=40, max_model_len=64))
    first, second = list(range(9)), list(range(10, 19))
    for prompt in (first, second):
        harness.add(prompt, 2)
        harness.drain()
    ids = [harness.add(prompt, 2) for prompt in (second, first)]
    harness.drain()
    assert cached(harness, *ids) == [8, 0]


def test_the_last_state_left_becomes_the_request_s_own() -> None:
    harness = Harness(Settings(max_num_seqs=1, state_slots=2, num_pages=40, max_model_len=64))
    prompt = list(range(9))
    harness.add(prompt, 2)
    harness.drain()
    states = harness.scheduler.resource(StateSlots)
    assert states is not None and states.num_kept == 1
    longer = harness.add([*prompt, 20, 21, 22, 23, 24], 2)
    harness.drain()
    assert cached(harness, longer) == [8]


def test_a_source_fills_no_state_that_a_launched_step_reads() -> None:
    harness = Harness(Settings(max_num_seqs=1, state_slots=2, num_pages=40, max_model_len=64, depth=2))
    prompt = list(range(9))
    harness.add(prompt, 2)
    harness.drain()
    states = harness.scheduler.resource(StateSlots)
    assert states is not None and states.num_kept == 1
    request = harness.add([*prompt, 20, 21], 2)
    harness.step()
    # The slot that is left holds the state with which the launched step begins.
    assert states.num_kept == 1 and states.begin_load() is None
    harness.drain()
    assert cached(harness, request) == [8]
    slot = states.begin_load()
    assert slot is not None
    states.end_load(slot, None)
    harness.scheduler.check_invariants()


def test_a_state_that_is_saved_is_not_given_up() -> None:
    harness = Harness(Settings(max_num_seqs=1, state_slots=2, num_pages=40, max_model_len=64))
    prompt = list(range(9))
    harness.add(prompt, 2)
    harness.drain()
    states = harness.scheduler.resource(StateSlots)
    assert states is not None
    pages = harness.kv.cache.peek(CacheKey(), np.array(prompt, dtype=np.int32)).tolist()
    ((num_pages, _),) = states.pin_unsaved(pages)
    assert num_pages == len(pages)
    other = harness.add([40, 41, 42, 43, 44], 2)
    harness.drain()
    assert cached(harness, other) == [0] and states.num_kept == 1
    states.unpin(pages[-1], is_saved=True)
    assert states.pin_unsaved(pages) == [], "it was saved"


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    harness = harness_of(caching=False)
    harness.add(list(range(18)))
    harness.drain()
    assert saves(harness) == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_session_goes_on_from_where_its_turn_ended(depth: int) -> None:
    prompt = list(range(18))
    stop = expected_output(prompt, 3)[-1]
    harness = harness_of(depth=depth, eos=frozenset([stop]))
    session = harness.open_session(prompt, 9)
    harness.extend(session, [30, 31, 32], 4)
    harness.drain()
    # With steps in flight the state has run on: it begins anew from the one that was kept.
    assert harness.scheduler.state.num_preemptions == (depth > 1)


def test_a_turn_that_ends_inside_its_drafts_begins_anew_from_a_kept_state() -> None:
    """A state has taken in all drafts that were right, those behind the stop among them."""
    prompt = list(range(18))
    answer = expected_output(prompt, 9)
    harness = harness_of(drafts=4, eos=frozenset([answer[3]]))
    harness.scheduler.state.drafters = (RightDrafter(),)
    session = harness.open_session(prompt, 9)
    harness.extend(session, [30, 31, 32], 4)
    harness.drain()
    assert harness.scheduler.state.num_preemptions == 1


class RightDrafter(KnowingDrafter):
    """Proposes four tokens that will come."""

    def draft(self, request: Request, limit: int) -> TokenArray:
        return np.array(expected_output(request.token_ids.tolist(), min(limit, 4)), dtype=np.int32)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_samples_change_no_output(depth: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10):
        harness = Harness(Settings(num_pages=24, depth=depth, state_slots=rng.randint(4, 9)))
        runner = LateRunner(harness, rng, 0.2)
        for _ in range(6):
            harness.add([rng.randrange(3) for _ in range(rng.randint(1, 16))], rng.randint(1, 10))
        harness.drain()
        assert runner.num_late or rng


class StateTrace(SchedulerTrace):
    """The random trace of a model with recurrent states."""

    @initialize(
        num_pages=st.integers(8, 20),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 8),
        budget=st.integers(5, 24),
        threshold=st.sampled_from([0, 0, 3]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fair", "fcfs", "priority"]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        admission=st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
        depth=st.sampled_from([1, 2, 4]),
        eos=st.frozensets(st.integers(0, 49), max_size=6),
        max_loras=st.integers(1, 3),
        lora_patience=st.integers(1, 6),
        drafts=st.sampled_from([0, 0, 4]),
    )
    def start(self, num_pages: int, page_size: int, spare: int, max_num_seqs: int, **overrides: object) -> None:
        slots = max_num_seqs + spare
        self.begin(num_pages, page_size, max_num_seqs=max_num_seqs, state_slots=slots, **overrides)
        states = self.harness.scheduler.resource(StateSlots)
        assert states is not None
        states._spacing = 2 * page_size  # texts are short


TestStateTrace = StateTrace.TestCase
TestStateTrace.settings = settings(
    max_examples=scaled(30), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
