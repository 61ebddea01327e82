"""Adapters are slots: counted, shared, freed for who has waited, and never the end of anybody's progress."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.engine.scheduler.harness import Harness
from tokenmill.engine.loop.step_log import read_log
from tokenmill.engine.scheduler.resources.adapter_slots import AdapterSlots
from tokenmill.lab.simulate.replay import replay


def adapters_of_step(harness: Harness) -> set[str]:
    """The adapters of the requests in the newest launched step."""
    in_flight = harness.scheduler.in_flight
    requests = in_flight[-1].requests if in_flight else ()
    return {request.cache_key.adapter for request in requests} - {""}


def test_a_request_without_a_slot_is_passed_over_and_says_why() -> None:
    harness = Harness(max_loras=1, lora_patience=100, num_pages=60, max_num_seqs=8)
    first = harness.add([1, 2, 3], 6, adapter="a")
    other = harness.add([1, 2, 4], 6, adapter="b")
    base, same = harness.add([2, 2], 6), harness.add([3, 3], 6, adapter="a")
    harness.step()
    requests = harness.scheduler.requests
    assert [requests[id].num_output_tokens for id in (first, other, base, same)] == [1, 0, 1, 1]
    assert harness.scheduler.explain(other) == "needs adapter b, the slot is in use"
    harness.drain()


def test_an_engine_without_adapters_refuses_them() -> None:
    harness = Harness()
    request_id = harness.add([1, 2], 3, adapter="a")
    record = harness.records[request_id]
    assert record.finish_reason is not None and not record.tokens


def test_adapters_share_no_pages_with_others_or_the_base() -> None:
    harness = Harness(max_loras=2, num_pages=60)
    prompt = list(range(12))
    for adapter in (None, "a", "b"):
        request_id = harness.add(prompt, 2, **({} if adapter is None else {"adapter": adapter}))
        harness.drain()
        assert harness.records[request_id].num_cached_tokens == 0
    for adapter in (None, "a", "b"):
        request_id = harness.add(prompt, 2, **({} if adapter is None else {"adapter": adapter}))
        harness.drain()
        assert harness.records[request_id].num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_who_has_waited_gets_the_slot_of_one_that_would_never_end(depth: int) -> None:
    patience = 10
    harness = Harness(
        max_loras=1, lora_patience=patience, depth=depth, num_pages=200, max_model_len=500, max_num_seqs=4
    )
    endless = harness.add([1, 2, 3], 400, adapter="a")
    for _ in range(3):
        harness.step()
    waiting = harness.add([4, 5, 6], 2, adapter="b")
    num_steps = 0
    while harness.records[waiting].finish_reason is None:
        assert num_steps < patience + 4 * depth + 4, "the slot is never freed"
        harness.add([7] * (num_steps + 1), 3, adapter="a")  # newcomers that would keep the slot busy
        harness.step()
        num_steps += 1
    assert harness.scheduler.requests[endless].num_preemptions == 1
    harness.drain()


def test_the_promoted_request_that_leaves_frees_its_claim() -> None:
    harness = Harness(max_loras=1, lora_patience=2, num_pages=200, max_model_len=300)
    harness.add([1, 2, 3], 100, adapter="a")
    promoted = harness.add([4, 5, 6], 2, adapter="b")
    for _ in range(4):
        harness.step()
        slots = harness.scheduler.resource(AdapterSlots)
        if slots is not None and slots._promoted is not None:
            break
    harness.abort(promoted)
    third = harness.add([4, 5, 6], 2, adapter="c")
    harness.drain()
    assert harness.records[third].tokens


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_many_adapters_over_few_slots_wait_no_longer_than_the_bound(policy: str, rng: np.random.Generator) -> None:
    num_adapters, num_slots, patience = 200, 8, 6
    harness = Harness(
        max_loras=num_slots, lora_patience=patience, num_pages=400, max_num_seqs=16, budget=32, policy=policy
    )
    began: dict[str, int] = {}
    arrived: dict[str, int] = {}
    most_waiting = 0
    while len(arrived) < 500 or harness.engine.has_work:
        if len(arrived) < 500 and rng.random() < 0.7:
            # One adapter has half of the traffic, so its slot is never free by itself.
            adapter = 0 if rng.random() < 0.5 else int(rng.integers(num_adapters))
            prompt = rng.integers(0, 3, rng.integers(1, 12)).tolist()
            request_id = harness.add(prompt, int(rng.integers(1, 12)), adapter=adapter)
            arrived[request_id] = harness.scheduler.step
        harness.step()
        assert len(adapters_of_step(harness)) <= num_slots
        for request in harness.scheduler.requests.values():
            if request.row is not None:
                began.setdefault(request.id, harness.scheduler.step)
        waiting = {r.cache_key.adapter for r in harness.scheduler.requests.values() if r.row is None}
        most_waiting = max(most_waiting, len(waiting))
    harness.check_outputs()
    waits = {request_id: began[request_id] - arrived[request_id] for request_id in arrived if request_id in began}
    # A turn of a slot: its holders' aging steps, the prompts that must bring a token first, and the next admission.
    bound = (patience + 16) * (most_waiting + 1)
    assert max(waits.values()) <= bound, Counter(waits).most_common(3)


def test_a_log_with_adapters_is_replayed_with_the_same_plans(tmp_path: Path, rng: np.random.Generator) -> None:
    log = tmp_path / "steps"
    harness = Harness(max_loras=2, lora_patience=3, num_pages=60, depth=2, log=log)
    for _ in range(40):
        if rng.random() < 0.6:
            adapter = {"adapter": int(rng.integers(5))} if rng.random() < 0.8 else {}
            harness.add(rng.integers(0, 3, rng.integers(1, 10)).tolist(), int(rng.integers(1, 8)), **adapter)
        harness.step()
    harness.drain()
    harness.engine.close()
    _, records = read_log(log)
    assert any(new["adapter"] for record in records if record.plan for new in record.plan["new_rows"])
    assert replay(log).difference is None


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_that_only_paused_sessions_hold_is_freed_in_the_first_turn(num_slots: int) -> None:
    harness = Harness(max_loras=num_slots, lora_patience=50, num_pages=60, max_num_seqs=6)
    for number in range(num_slots):
        session = harness.add([number, 2, 3], 2, is_resumable=True, adapter=number)
        harness.sessions[session] = []
    while harness.engine.has_work:
        harness.step()
    late = harness.add([4, 5, 6], 2, adapter="late")
    harness.step()  # which fails where somebody could run and the plan is empty
    assert harness.records[late].tokens
    harness.drain()
