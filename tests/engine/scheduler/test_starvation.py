"""No request starves: each ends after a number of steps that does not depend on who comes later."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.engine.scheduler.harness import Harness

POLICIES = ["fair", "fcfs", "priority"]
BATCH_POLICIES = ["mixed", "decode-first", "prefill-first"]
ADMISSIONS = ["whole-prompt", "optimistic", "reserve"]


def fresh() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


class BusyTenants:
    """Ten tenants who always have two requests each, so that a step's budget is always used up."""

    def __init__(self, harness: Harness, rng: random.Random, priority: int = 0) -> None:
        self._harness, self._rng, self._priority = harness, rng, priority

    def step(self) -> None:
        alive = [request.tenant for request in self._harness.scheduler.requests.values()]
        for number in range(10):
            tenant = f"busy {number}"
            for _ in range(2 - alive.count(tenant)):
                prompt = [self._rng.randrange(50) for _ in range(self._rng.randint(60, 120))]
                self._harness.add(prompt, self._rng.randint(1, 6), tenant=tenant, priority=self._priority)
        self._harness.step()

    def steps_until(self, request_id: str, most: int) -> int:
        """Return the number of steps until a request has ended; fail where it takes more."""
        for number in itertools.count():
            if self._harness.records[request_id].finish_reason is not None:
                return number
            assert number <= most, f"not answered: {self._harness.scheduler.explain(request_id)}"
            self.step()
        raise AssertionError


def busy_harness(**overrides: object) -> Harness:
    return Harness(
        **{"num_pages": 2000, "page_size": 16, "max_num_seqs": 32, "budget": 64, "max_model_len": 640, **overrides}
    )


@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
@pytest.mark.parametrize(("policy", "is_background"), [*((policy, True) for policy in POLICIES), ("priority", False)])
def test_who_begins_like_one_of_a_worse_class_does_not_wait_for_it(
    policy: str, batch_policy: str, is_background: bool
) -> None:
    rng = fresh()
    harness = busy_harness(policy=policy, batch_policy=batch_policy)
    prompt = [rng.randrange(50) for _ in range(rng.randint(90, 160))]
    harness.add(prompt, 8, tenant="batch", is_background=is_background, priority=5)
    harness.step()
    busy = BusyTenants(harness, rng)
    for _ in range(4):
        busy.step()
    common = prompt[: rng.randint(80, len(prompt))]
    late = harness.add([*common, 1, 2], 2, tenant="late")
    # By turns: as many steps as it needs itself, beside eleven others.
    assert busy.steps_until(late, most=80) > 0
    harness.drain()


def test_those_of_the_better_class_still_compute_it_once() -> None:
    harness = busy_harness()
    prompt = [7] * 300
    line = harness.add(prompt, 4, is_background=True)
    harness.step()
    first, second = harness.add(prompt, 4), harness.add(prompt, 4)
    harness.step()
    harness.step()
    assert harness.scheduler.requests[first].awaited_page is None
    harness.drain()
    assert harness.records[second].num_cached_tokens == 288
    assert harness.records[line].tokens == harness.records[first].tokens


@pytest.mark.parametrize("is_background", [False, True])
def test_the_background_waits_for_anybody_who_computes_the_same(is_background: bool) -> None:
    harness = busy_harness()
    prompt = [7] * 300
    harness.add(prompt, 4, is_background=is_background)
    harness.step()
    second = harness.add(prompt, 4, is_background=True)
    harness.drain()
    assert harness.records[second].num_cached_tokens == 288


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slot_that_the_background_holds_without_getting_on_is_given_up(policy: str) -> None:
    rng = fresh()
    harness = busy_harness(policy=policy, max_loras=1, lora_patience=4)
    line = harness.add([1] * 500, 8, adapter="a", is_background=True)
    harness.step()
    busy = BusyTenants(harness, rng)
    for _ in range(4):
        busy.step()
    late = harness.add([2] * 40, 2, tenant="late", adapter="b")
    busy.steps_until(late, most=100)
    assert harness.scheduler.requests[line].num_preemptions == 1
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_comes_later_the_oldest_ends(policy: str, batch_policy: str, admission: str, depth: int) -> None:
    """A flood that never ends, of a better class, that wants more of everything than there is."""
    rng = fresh()
    harness = Harness(
        policy=policy,
        batch_policy=batch_policy,
        admission=admission,
        depth=depth,
        num_pages=rng.randint(9, 16),
        budget=rng.randint(5, 12),
        max_num_seqs=rng.randint(1, 4),
        patience=6,
    )
    watched = []
    for number in range(3):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        is_background = number > 0 or policy == "fcfs"
        watched.append(harness.add(prompt, rng.randint(1, 10), priority=3, is_background=is_background))
    num_steps = 0
    while any(harness.records[one].finish_reason is None for one in watched):
        while len(harness.scheduler.state.waiting) < 6:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            harness.add(prompt, rng.choice([1, 1, rng.randint(1, 10)]), tenant=str(rng.randrange(10**6)))
        harness.step()
        num_steps += 1
        bound = len(watched) * harness.most_steps_of_an_elder()
        assert num_steps <= bound, {one: harness.scheduler.explain(one) for one in harness.scheduler.requests}
    harness.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_is_as_old_as_its_turn(policy: str) -> None:
    """One that goes on and on does not keep others from being the oldest."""
    harness = Harness(policy=policy, patience=4, max_num_seqs=2, num_pages=40, max_model_len=120)
    session = harness.open_session([1, 2, 3], 3)
    line = harness.add([4, 5, 6], 8, is_background=True)
    num_steps = 0
    while harness.records[line].finish_reason is None:
        assert num_steps <= 100, harness.scheduler.explain(line)
        if not harness.inputs.get(session) and not harness.extend(session, [num_steps % 50], 3):
            harness.abort(session)
            session = harness.open_session([1, 2, 3], 3)
        harness.add([7] * 9, 1)
        harness.step()
        num_steps += 1
    harness.drain()
