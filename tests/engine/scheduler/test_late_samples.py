"""Steps that bring a request no token: its grammar mask was not ready in time, or its grammar cannot go on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine.scheduler.harness import Harness, Settings
from tests.engine.transfer.fake_source import TransferHarness
from tokenmill.core.plan import RowFailure, StepPlan, StepResult
from tokenmill.core.request import CacheKey, FinishReason
from tokenmill.engine.transfer.extension import TransferExecutor
from tokenmill.lab.conformance.memory_runner import PagedMemoryRunner, result_of


class LateRunner(PagedMemoryRunner):
    """Leaves out some samples, as a runner whose masks are late: what was launched after one is left out too."""

    def __init__(self, harness: Harness, rng: random.Random, share: float) -> None:
        settings = harness.settings
        sizes = (settings.max_num_seqs, settings.num_pages, settings.page_size, settings.max_model_len)
        super().__init__(*sizes, bool(settings.state_slots), settings.window)
        self.told, self.memory = harness.runner.told, harness.runner.memory
        self.rng = rng
        self.share = share
        self.failing_rows: set[str] = set()
        self.next_position: dict[int, int] = {}
        harness.runner = self
        if harness.connector is None:
            harness.engine.executor = self
        else:
            harness.engine.executor = TransferExecutor(self, harness.connector)

    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self.next_position[new.row] = len(new.token_ids)
        result = super().execute(plan)
        brought = [part.tolist() for part in np.split(result.token_ids, result.token_starts[1:-1])]
        failures = {}
        for index in np.flatnonzero(plan.num_samples).tolist():
            row, end = int(plan.rows[index]), int(plan.num_computed[index] + plan.num_scheduled[index])
            position = end - int(plan.num_samples[index]) + 1
            if position != self.next_position[row] or self.rng.random() < self.share:
                self.num_late += 1
                brought[index] = []
                self.token_table[row, position] = 7  # a token that nobody sampled
            elif plan.request_ids[index] in self.failing_rows:
                brought[index] = []
                failures[index] = RowFailure("its grammar cannot go on", status=400)
            else:
                self.next_position[row] += len(brought[index])
        return result_of(
            plan, brought, failures=failures, prompt_logprobs=result.prompt_logprobs, embeddings=result.embeddings
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_samples_change_no_output(depth: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_late = num_preemptions = 0
    for _ in range(25):
        harness = Harness(
            depth=depth,
            drafts=rng.choice([0, 4]),
            num_pages=rng.randint(9, 14),
            threshold=rng.choice([0, 3]),
            eos=frozenset({3, 11}),
        )
        runner = LateRunner(harness, rng, rng.choice([0.1, 0.4, 0.8]))
        for _ in range(rng.randint(3, 9)):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 18))]
            for _ in range(rng.choice([1, 1, 3])):
                harness.add(prompt, rng.randint(1, 12))
            for _ in range(rng.randint(0, 6)):
                harness.step()
            if rng.random() < 0.2:
                harness.abort(str(rng.randrange(len(harness.records))))
        harness.drain()
        num_late += runner.num_late
        num_preemptions += harness.scheduler.state.num_preemptions
    assert num_late > 50
    assert num_preemptions > 0


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("has_sources", [False, True])
def test_pages_of_void_steps_are_nobody_elses_until_these_are_committed(depth: int, has_sources: bool) -> None:
    """Draft pages are taken back while pages are short; not those that a launched step may still write."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_late = num_checked = 0
    for _ in range(30):
        settings = Settings(
            num_pages=rng.randint(8, 16),
            page_size=rng.choice([1, 2, 4]),
            depth=depth,
            drafts=4,
            policy=rng.choice(["fair", "fcfs", "priority"]),
            admission=rng.choice(["whole-prompt", "optimistic"]),
        )
        settings.max_model_len = min(32, settings.num_pages * settings.page_size)
        harness = TransferHarness(settings, rng, 0.2) if has_sources else Harness(settings)
        runner = LateRunner(harness, rng, rng.choice([0.1, 0.3, 0.6]))
        for _ in range(rng.randint(3, 9)):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, settings.max_model_len - 1))]
            if isinstance(harness, TransferHarness) and rng.random() < 0.5:
                harness.sources[0].put(CacheKey(), prompt)
            harness.add(prompt, rng.randint(1, 12))
            for _ in range(rng.randint(0, 6)):
                harness.step()
        harness.drain()
        num_late += runner.num_late
        num_checked += harness.uses.num_checked
    assert num_late > 50
    assert num_checked > 1000


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_request_leaves_the_others_alone(depth: int) -> None:
    with_late, without = Harness(depth=depth), Harness(depth=depth)
    runner = LateRunner(with_late, random.Random(0), 0.0)
    for harness in (with_late, without):
        for start in (1, 2):
            harness.add([start] * 5, 10)
        harness.step()
    runner.next_position[0] = 99  # the first row has no mask until further notice
    for _ in range(6):
        with_late.step()
        without.step()
    assert len(with_late.records["0"].tokens) < len(without.records["0"].tokens)
    assert with_late.records["1"].tokens == without.records["1"].tokens
    late = with_late.scheduler.requests["0"]
    runner.next_position[0] = late.num_tokens
    with_late.drain()
    without.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_cannot_go_on_ends_alone(depth: int) -> None:
    harness = Harness(depth=depth)
    runner = LateRunner(harness, random.Random(0), 0.0)
    failing, other = harness.add([1, 2, 3], 6), harness.add([4, 5, 6], 6)
    runner.failing_rows.add(failing)
    harness.drain()
    assert harness.records[failing].finish_reason is FinishReason.ERROR
    assert harness.records[failing].tokens == []
    assert harness.records[other].finish_reason is FinishReason.LENGTH


def test_what_was_computed_for_a_request_that_fails_is_not_found_by_others() -> None:
    harness = Harness(page_size=4)
    runner = LateRunner(harness, random.Random(0), 0.0)
    runner.failing_rows.add("0")
    prompt = list(range(12))
    harness.add(prompt, 4)
    harness.drain()
    harness.add(prompt, 4)
    harness.drain()
    assert harness.scheduler.kv.num_hit_tokens == 0
    harness.add(prompt, 4)
    harness.drain()
    assert harness.scheduler.kv.num_hit_tokens == 8
