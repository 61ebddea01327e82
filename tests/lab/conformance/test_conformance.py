"""Five schedulers hold what every one must, and a dozen with one fault each are found out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lab.conformance.faulty import FAULTY, Gambler, Plain
from tests.lab.conformance.one_at_a_time import OneAtATime
from tests.tiers import scaled
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.scheduling import SchedulerInterface
from tokenmill.engine.scheduler.policies import ADMISSION_POLICIES, BATCH_POLICIES, QUEUE_POLICIES
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.testing import SchedulerFault, check_scheduler

EXAMPLES = Path(__file__).parents[3] / "examples"


def a_seed() -> int:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
@pytest.mark.parametrize("admission", ADMISSION_POLICIES)
def test_ours_holds_it_under_each_policy(batch_policy: str, admission: str) -> None:
    for policy in QUEUE_POLICIES:
        settings = {"policy": policy, "batch_policy": batch_policy, "admission": admission}
        check_scheduler(Scheduler, scaled(2), a_seed(), **settings)


@pytest.mark.parametrize("name", ["prefill_first:PrefillFirst", "round_robin:RoundRobin"])
def test_the_examples_hold_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    check_scheduler(name, scaled(12), a_seed())


@pytest.mark.parametrize("kind", [Plain, OneAtATime])
def test_a_plain_one_and_one_from_nothing_hold_it(kind: type[SchedulerInterface]) -> None:
    check_scheduler(kind, scaled(8), a_seed())


@pytest.mark.parametrize("kind", FAULTY)
def test_a_fault_is_found_and_its_seed_shows_it_again(kind: type[SchedulerInterface]) -> None:
    with pytest.raises(SchedulerFault, match=FAULTY[kind]) as found:
        check_scheduler(kind, 60, seed=0)
    if kind is Gambler:
        return  # what it did then was chance
    seed = int(str(found.value).split("seed ")[1].split(":")[0])
    with pytest.raises(SchedulerFault):
        check_scheduler(kind, 1, seed=seed)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="module:Class"):
        check_scheduler("mixed")
