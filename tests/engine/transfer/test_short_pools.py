"""Let requests wait for pages that are being saved only where no other request holds them, and say so."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler.harness import Settings
from tests.engine.transfer.fake_source import TransferHarness
from tokenmill.engine.transfer.state import TransferState


def deaf_harness(rng: random.Random, **settings: object) -> TransferHarness:
    """Its store takes saves and never reads them, and no deadline comes: its clock stands still."""
    harness = TransferHarness(Settings(**settings), rng, 0.0)  # type: ignore[arg-type]
    harness.sources[1]._go_on_saving = lambda save: False  # type: ignore[method-assign]
    assert harness.connector is not None
    harness.connector._clock = lambda: 0.0
    return harness


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_those_who_run_do_not_wait_for_saves_of_what_they_hold_themselves(policy: str, depth: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_saving = 0
    for _ in range(6):
        harness = deaf_harness(rng, num_pages=16, max_num_seqs=12, budget=64, policy=policy, depth=depth)
        length = rng.randint(10, 15)
        for _ in range(12):
            harness.add([rng.randrange(50) for _ in range(length)], rng.randint(5, 8))
        # Without an end: those that run hold all pages, and each waits for the others' saves.
        for _ in range(8):
            harness.step()
            transfers = harness.scheduler.resource(TransferState)
            assert transfers is not None
            num_saving = max(num_saving, len(list(transfers.saving)))
            for request in harness.scheduler.requests.values():
                is_waiting = request.is_running and "saves still use" in request.wait_reason
                assert not is_waiting or harness.scheduler.state.num_saving_pages > 0, "a reason that is not true"
        steps = 0
        while harness.scheduler.state.running and not harness.scheduler.state.num_saving_pages and steps < 400:
            harness.step()
            steps += 1
        assert steps < 400
        ended = [record for record in harness.records.values() if record.finish_reason is not None]
        assert ended, "nobody gets on"
    assert num_saving > 0


def test_who_waits_for_a_save_is_told_so() -> None:
    harness = deaf_harness(random.Random(0), num_pages=8, budget=64)
    first = harness.add(list(range(12)), 2)
    while harness.records[first].finish_reason is None:
        harness.step()
    second = harness.add(list(range(20, 34)), 16)
    for _ in range(16):
        harness.step()
    assert harness.scheduler.explain(second) == "waiting for 1 page that saves still use"
