"""Run a log under other policies: its own come out as recorded, others as they are made to."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.loop.test_step_log import record_traffic
from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.loop.step_log import StepLog, StepRecord, read_log
from tokenmill.lab.simulate.policies import Schedule, StepCost, compare

SEED = seed_for(__name__)


def record_rush(path: Path, depth: int = 1, policy: str = "fcfs", admission: str = "optimistic") -> Harness:
    """Requests that all come at once, more than there are pages for."""
    harness = Harness(depth=depth, num_pages=12, budget=10, policy=policy, admission=admission, log=path)
    generator = random.Random(SEED)
    for number in range(25):
        prompt = [generator.randrange(40) for _ in range(generator.randint(1, 12))]
        harness.add(prompt, generator.randint(4, 12), priority=-number)
    harness.drain()
    harness.engine.close()
    return harness


def counts(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.num_steps, schedule.num_tokens, schedule.num_preemptions


@pytest.mark.parametrize("depth", [1, 2])
def test_the_policies_of_the_log_come_out_as_they_were_recorded(tmp_path: Path, depth: int) -> None:
    harness = record_rush(tmp_path / "log", depth)
    own, again = compare(tmp_path / "log", [{"policy": "fcfs"}])
    plans = harness.runner.plans
    recorded = len(plans), sum(plan.num_tokens for plan in plans), harness.scheduler.state.num_preemptions
    assert counts(own) == counts(again) == recorded, f"seed {SEED}"
    assert recorded[2] > 0
    assert own.end == again.end
    assert len(own.end) == len(own.first_token) == len(harness.records)
    assert max(own.end) == pytest.approx(own.seconds)


def test_other_policies_do_what_they_are_for(tmp_path: Path) -> None:
    record_rush(tmp_path / "log")
    changes = [{"admission": "reserve"}, {"policy": "priority"}, {"batch_policy": "prefill-first"}]
    own, reserve, priority, prefill = compare(tmp_path / "log", changes)
    assert own.num_preemptions > 0, f"seed {SEED}"
    assert reserve.num_preemptions == 0
    assert reserve.num_tokens <= own.num_tokens
    assert priority.end != own.end
    assert prefill.num_steps != own.num_steps
    for other in (reserve, priority, prefill):
        assert len(other.end) == len(own.end), "every request comes to its end, whatever the order"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_log_with_everything_in_it_can_be_compared(tmp_path: Path, depth: int) -> None:
    harness = record_traffic(tmp_path / "log", depth)
    policies = [{"policy": policy, "admission": one} for policy in ("fair", "priority") for one in ("reserve",)]
    for schedule in compare(tmp_path / "log", policies):
        assert schedule.num_steps > 10
        assert 0 < len(schedule.first_token) <= len(harness.records)
        assert all(first > 0 for first in schedule.first_token)


def test_a_client_that_left_leaves_after_as_many_tokens(tmp_path: Path) -> None:
    harness = Harness(num_pages=20, log=tmp_path / "log")
    left = harness.add([1, 2, 3], max_tokens=20)
    harness.add([4, 5, 6], max_tokens=20)
    for _ in range(6):
        harness.step()
    brought = len(harness.records[left].tokens)
    harness.abort(left)
    harness.drain()
    harness.engine.close()
    assert 0 < brought < 20
    own, other = compare(tmp_path / "log", [{"admission": "reserve"}])
    assert own.num_tokens == sum(plan.num_tokens for plan in harness.runner.plans)
    assert counts(other) == counts(own)


def test_a_log_that_was_cut_off_ends_its_requests_there(tmp_path: Path) -> None:
    record_rush(tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    own, other = compare(tmp_path / "cut", [{"policy": "priority"}])
    assert len(own.first_token) > 0
    assert len(other.end) == len(own.end)


def test_requests_wait_for_the_time_at_which_they_came(tmp_path: Path) -> None:
    record_rush(tmp_path / "log")
    header, stored = read_log(tmp_path / "log")
    records = list(stored)
    late = records[0].inputs.pop()
    records[-1].inputs.append(late)
    for record in records:
        record.seconds = (0.0, 1.0, 0.0)
    with StepLog(tmp_path / "changed", header) as log:
        for record in records:
            log._write(record)
    [own] = compare(tmp_path / "changed", [])
    assert own.seconds > len(records) - 1


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_a_step_costs_what_the_recorded_ones_did(noise: float) -> None:
    generator = np.random.default_rng(SEED)
    tokens = generator.integers(1, 500, 200).tolist()
    seconds = [0.01 + 0.0002 * count + noise * float(generator.standard_normal()) for count in tokens]
    records = [
        StepRecord(plan={"num_scheduled": [count]}, seconds=(0.0, spent, 0.0))
        for count, spent in zip(tokens, seconds, strict=True)
    ]
    cost = StepCost.fit_records([*records, StepRecord(seconds=(9.0, 9.0, 9.0))])
    assert cost.per_step == pytest.approx(0.01, abs=0.001), f"seed {SEED}"
    assert cost.per_token == pytest.approx(0.0002, rel=0.05)


def test_a_cost_is_never_below_nothing() -> None:
    falling = [StepRecord(plan={"num_scheduled": [count]}, seconds=(0.0, 9.0 - count, 0.0)) for count in (1, 5)]
    assert StepCost.fit_records(falling) == StepCost(6.0, 0.0)
    assert StepCost.fit_records(falling[:1]) == StepCost(8.0, 0.0)
    assert StepCost.fit_records([]) == StepCost(0.0, 0.0)


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    record_rush(tmp_path / "log")
    with pytest.raises(InvalidConfig, match="must be one of fair, fcfs, priority"):
        compare(tmp_path / "log", [{"policy": "fastest"}])
