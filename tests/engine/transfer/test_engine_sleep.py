"""An engine that gives its memory back: what only it has is stored before, and found again."""

from __future__ import annotations

from tests.engine.transfer.fake_source import TransferHarness
from tests.engine.transfer.test_transfers import PROMPT, make_harness, run
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.loop.engine import Engine


class Sleeper(EngineExtension):
    """Notes that its memory was given back."""

    def __init__(self, harness: TransferHarness) -> None:
        self.harness = harness
        self.num_stored = -1

    def sleep(self) -> None:
        assert self.harness.kv.num_available == self.harness.kv.pool.num_usable, "nothing is cached, nothing is pinned"
        self.num_stored = len(self.harness.sources[1].pages)


def sleepy(harness: TransferHarness) -> Sleeper:
    """Let the engine of a harness sleep."""
    sleeper, engine = Sleeper(harness), harness.engine
    extensions = [*engine._extensions, sleeper]
    harness.engine = Engine(harness.scheduler, engine.executor, engine.limits, 1, engine._observer, extensions)
    return sleeper


def test_an_engine_stores_what_only_it_has_before_it_sleeps() -> None:
    harness = make_harness()
    sleeper = sleepy(harness)
    harness.add(PROMPT, max_tokens=2)
    harness.step()
    assert not harness.engine.sleep(), "a request is alive"
    while harness.scheduler.requests:
        harness.step()
    # Before a plan has ordered the save.
    assert harness.engine.sleep()
    harness.scheduler.check_invariants()
    assert sleeper.num_stored == 3, "15 of 16 tokens were run: three pages of four"
    request_id = harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert harness.records[request_id].num_cached_tokens == 12


def test_an_engine_whose_memory_cannot_be_given_back_does_not_sleep_and_forgets_nothing() -> None:
    harness = make_harness()
    harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert not harness.engine.sleep()
    request_id = harness.add(PROMPT, max_tokens=2)
    run(harness)
    assert harness.records[request_id].num_cached_tokens == 12
