import random
from pathlib import Path

import pytest
from benchmarks.peers.adapters import adapter
from benchmarks.peers.adapters.adapter import OnStep, Point, Setup, measure

PREFILL_SECONDS, STEP_SECONDS = 0.05, 0.01


class Clock:
    """Stands for the module `time`: only work takes time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(adapter, "time", Clock())
    return adapter.time


class SlowEngine:
    """Prefills one request after the other, then decodes all at once; `missing` tokens are never brought."""

    packages = ()

    def __init__(self, clock: Clock, missing: int = 0):
        self.clock = clock
        self.missing = missing
        self.prepared = []
        self.prompts = []

    def prepare(self, batch_size: int, context_len: int) -> None:
        self.prepared.append((batch_size, context_len))

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        self.prompts += prompts
        counts = [0] * len(prompts)
        for number in range(len(prompts)):
            self.clock.now += PREFILL_SECONDS
            counts[number] = 1
            on_step(counts)
        for _ in range(num_tokens - 1 - self.missing):
            self.clock.now += STEP_SECONDS
            counts = [count + 1 for count in counts]
            on_step(counts)


def test_decode_is_what_comes_after_the_last_first_token(clock):
    engine = SlowEngine(clock)
    outcome = measure(engine, Point("p", 3, 20, 11, repeats=2), random.Random(0))
    assert outcome["prefill_tokens_per_second"] == pytest.approx(3 * 20 / (3 * PREFILL_SECONDS), abs=0.1)
    assert outcome["decode_tokens_per_second"] == pytest.approx(3 / STEP_SECONDS, abs=0.1)
    assert outcome["decode_tokens_per_cpu_second"] == pytest.approx(outcome["decode_tokens_per_second"] / 2)
    assert engine.prepared == [(3, 31)] * 2
    assert [len(prompt) for prompt in engine.prompts] == [20] * 6
    assert len({tuple(prompt) for prompt in engine.prompts}) == 6


def test_a_single_token_has_no_decode(clock):
    outcome = measure(SlowEngine(clock), Point("p", 1, 20, 1), random.Random(0))
    assert outcome["decode_tokens_per_second"] is None


def test_an_engine_that_brings_less_than_asked_is_no_measurement(clock):
    with pytest.raises(RuntimeError, match="is not the end of 8 tokens"):
        measure(SlowEngine(clock, missing=1), Point("p", 2, 3, 4), random.Random(0))


def test_a_setup_survives_its_file(tmp_path: Path):
    points = (Point("a", 1, 2, 3), Point("b", 4, 5, 6, repeats=7))
    setup = Setup("model", "int8", 2, 1 << 31, 5, 1.25, points, "outcome")
    setup.write(tmp_path / "setup.json")
    assert Setup.read(str(tmp_path / "setup.json")) == setup
    assert (setup.max_batch_size, setup.max_context_len) == (4, 11)
