"""Prompts that differ inside a page: the equal beginning is copied, and never a page that is gone or written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.scheduler.harness import Harness, Settings
from tests.engine.scheduler.test_random_traces import SchedulerTrace
from tests.tiers import scaled
from tokenmill.core.plan import StepPlan
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead
from tokenmill.engine.transfer.page_copies import MOST_COMPARED, PageCopies
from tokenmill.lab.simulate.replay import replay

SIZE = 8


def run_to_end(harness: Harness, prompt: list[int], max_tokens: int = 1, **params: object) -> int:
    """Run a request alone; return the tokens of its prompt that it did not run."""
    request_id = harness.add(prompt, max_tokens, **params)  # type: ignore[arg-type]
    harness.drain()
    return harness.records[request_id].num_cached_tokens


def copies(harness: Harness) -> list[list[int]]:
    """Return the copies of all plans, [source, target] each."""
    found = [plan.page_copies for plan in harness.runner.plans if plan.page_copies is not None]
    return [pair for one in found for pair in one.T.tolist()]


def test_equal_beginning_of_a_page_is_not_run_again() -> None:
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=2)
    shared = [*range(SIZE + 3)]
    assert run_to_end(harness, [*shared, *[40] * 10]) == 0
    assert run_to_end(harness, [*shared, *[41] * 10]) == SIZE + 3
    plan = harness.runner.plans[-1]
    assert (plan.num_computed.tolist(), plan.num_scheduled.tolist()) == ([SIZE + 3], [10])
    assert len(copies(harness)) == 1
    assert harness.engine.stats().prefix_partial_hits == 3
    assert harness.engine.stats().prefix_hits == SIZE + 3


def test_longest_of_several_beginnings_is_taken() -> None:
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=2)
    for count in (1, 5, 3):
        run_to_end(harness, [*range(count), *[40 + count] * SIZE])
    assert run_to_end(harness, [*range(6), *[30] * SIZE]) == 5


def test_short_prompt_begins_inside_the_page_of_a_longer_one() -> None:
    """It ends inside that page; its last token is run all the same."""
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=2)
    run_to_end(harness, [*range(6)], max_tokens=8)
    assert run_to_end(harness, [*range(6)]) == 5


@pytest.mark.parametrize(
    ("params", "options"),
    [({"salt": "s"}, {}), ({"adapter": 1}, {"max_loras": 1}), ({"prompt_logprobs": 1}, {}), ({"pooling": "mean"}, {})],
)
def test_who_shares_no_pages_copies_none(params: dict[str, object], options: dict[str, int]) -> None:
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=1, **options)
    run_to_end(harness, [*range(6), *[40] * 10])
    assert run_to_end(harness, [*range(6), *[41] * 10], **params) == 0
    assert not copies(harness)


def test_too_few_tokens_are_not_copied() -> None:
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=4)
    run_to_end(harness, [*range(3), *[40] * 10])
    assert run_to_end(harness, [*range(3), *[41] * 10]) == 0
    assert run_to_end(harness, [*range(3), 40, 42, *[43] * 10]) == 4


def test_page_that_is_read_stays_until_the_step_is_committed() -> None:
    """Of its long edge that page alone is pinned, and an abort of the reader changes nothing for the launched step."""
    harness = Harness(page_size=4, num_pages=12, budget=40, max_num_seqs=2, depth=2, least_copied=2)
    run_to_end(harness, [*range(24)])
    available = harness.kv.num_available
    reader = harness.add([0, 1, 2, 40, 41, 42], 4)
    harness.step()
    assert len(copies(harness)) == 1
    assert len(harness.scheduler.in_flight) == 1
    assert harness.kv.num_available == available - 2 - 1, "two pages of its own, and the one that it reads"
    harness.abort(reader)
    assert harness.kv.num_available == available - 3
    harness.drain()
    assert harness.kv.num_available == available


def test_failed_step_lets_go_of_the_page() -> None:
    harness = Harness(page_size=4, num_pages=12, budget=40, least_copied=2)
    run_to_end(harness, [*range(8)])
    harness.runner.failing_steps.add(harness.scheduler.step + 1)
    harness.add([0, 1, 2, 40, 41, 42], 4)
    harness.drain()
    assert copies(harness)
    assert harness.kv.num_pinned == 0


def test_request_that_needs_all_pages_reads_one_of_its_own() -> None:
    """The page that it reads is evicted for it: it is among its pages, and is read before it is written."""
    harness = Harness(page_size=4, num_pages=4, budget=40, max_model_len=16, max_num_seqs=1, least_copied=2)
    run_to_end(harness, [*range(8)])
    assert run_to_end(harness, [0, 1, 2, *range(30, 42)]) == 3
    ((source, target),) = copies(harness)
    used = harness.runner.page_table[0].tolist()
    assert source in used
    assert target == used[0]


def test_request_that_cannot_begin_after_all_gives_its_copy_back() -> None:
    harness = Harness(page_size=4, num_pages=12, budget=40, least_copied=2)
    run_to_end(harness, [*range(8)])
    state = harness.scheduler.state
    request = state.requests[harness.add([0, 1, 2, 40, 41, 42], 4)]
    match = state.match(request, state.step + 1)
    assert match.num_tokens == 3
    assert not state.resources.acquire_all(request, match, 6, state.step + 1)
    assert harness.kv.num_pinned == 3
    state.resources.release_all(request, state.step + 1)
    assert harness.kv.num_pinned == 0
    harness.scheduler.check_invariants()
    harness.drain()
    assert len(copies(harness)) == 1


def test_page_that_was_evicted_since_the_match_is_not_read() -> None:
    harness = Harness(page_size=4, num_pages=12, budget=40, least_copied=2)
    run_to_end(harness, [*range(8)])
    state = harness.scheduler.state
    request = state.requests[harness.add([0, 1, 2, 40, 41, 42], 4)]
    match = state.match(request, state.step + 1)
    assert harness.kv.clear_cache()
    harness.kv.pool.allocate(12)  # by whoever
    assert match.begins_as is not None
    source = match.begins_as[1]
    harness.kv.pool.free([page for page in range(1, 13) if page != source])
    assert "evicted" in state.resources.acquire_all(request, match, 6, state.step + 1)
    harness.kv.pool.free([source])
    harness.scheduler.check_invariants()
    harness.drain()
    assert not copies(harness)


def test_only_so_many_pages_are_compared() -> None:
    harness = Harness(
        page_size=4, num_pages=MOST_COMPARED + 8, budget=40, max_model_len=16, max_num_seqs=1, least_copied=3
    )
    run_to_end(harness, [0, 1, 2, 3, 4])
    for number in range(MOST_COMPARED):
        run_to_end(harness, [5 + number % 40, number // 40, 0, 0, 0])
    assert run_to_end(harness, [0, 1, 2, 9, 9]) == 0
    run_to_end(harness, [0, 1, 2, 3, 4])


def test_tokens_that_are_found_are_those_of_a_slow_obvious_model(rng: np.random.Generator) -> None:
    """Every earlier prompt, compared token by token: the longest common beginning counts, if its page is full."""
    for least in (1, 3):
        harness = Harness(page_size=4, num_pages=400, budget=64, max_model_len=32, least_copied=least)
        earlier: list[list[int]] = []
        for _ in range(25):
            prompt = rng.integers(0, 2, int(rng.integers(2, 24))).tolist()
            found = run_to_end(harness, prompt)
            assert found == tokens_found(prompt, earlier, 4, least)
            earlier.append(prompt)


def tokens_found(prompt: list[int], earlier: list[list[int]], size: int, least: int) -> int:
    """Return the tokens that need not be run: whole pages, then what the next page has in common with a full one."""
    longest = 0
    for other in earlier:
        full = other[: len(other) // size * size]
        common = next((i for i, pair in enumerate(zip(prompt, full, strict=False)) if pair[0] != pair[1]), None)
        longest = max(longest, min(len(prompt), len(full)) if common is None else common)
    longest = min(longest, len(prompt) - 1)
    inside = longest % size
    return longest if inside >= least else longest - inside


class CopyTrace(SchedulerTrace):
    """As `SchedulerTrace`, with pages that are copied whatever that saves: their answers prove each copy right."""

    @initialize(
        num_pages=st.integers(4, 20),
        page_size=st.sampled_from([2, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        threshold=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fair", "fcfs", "priority"]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        admission=st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
        depth=st.sampled_from([1, 2, 4]),
        drafts=st.sampled_from([0, 0, 4]),
        eos=st.frozensets(st.integers(0, 49), max_size=6),
        max_loras=st.integers(1, 3),
        least_copied=st.sampled_from([1, 1, 2]),
        window=st.sampled_from([0, 0, 1, 5, 9]),
        num_windows=st.integers(1, 3),
    )
    def start(  # type: ignore[override]
        self, num_pages: int, page_size: int, window: int, num_windows: int, **overrides: object
    ) -> None:
        if window:
            depth, budget = int(str(overrides["depth"])), int(str(overrides["budget"]))
            count = num_windows * most_window_pages(window, page_size) + num_pages_ahead(depth * budget, page_size)
            overrides["window"] = WindowSettings(window, count)
        self.begin(num_pages, page_size, **overrides)

    def make_harness(self, settings: Settings) -> Harness:
        harness = Harness(settings)
        harness.runner.told.append(check_copies)
        return harness


def check_copies(plan: StepPlan) -> None:
    """Check that a step writes no page twice, and reads none that it has written."""
    if plan.page_copies is not None:
        for sources, targets in plan.page_copies.reshape(-1, 2, plan.page_copies.shape[1]).tolist():
            assert len(set(targets)) == len(targets)
            for number, target in enumerate(targets):
                assert target not in sources[number + 1 :], "a copy of a copy"


TestCopyTrace = CopyTrace.TestCase
TestCopyTrace.settings = settings(
    max_examples=scaled(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_replay_orders_the_same_copies(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    harness = Harness(page_size=SIZE, num_pages=12, budget=32, least_copied=2, log=log)
    for last in (40, 41, 42):
        run_to_end(harness, [*range(6), *[last] * 10])
    harness.engine.close()
    assert len(copies(harness)) == 2
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans == len(harness.runner.plans)


def test_header_of_an_older_log_copies_none() -> None:
    assert Harness(page_size=SIZE).scheduler.resource(PageCopies) is None
