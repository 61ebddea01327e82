"""Simulated runs: a recorded one comes out again as it was, hits are those of the hashes, and runs repeat."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.loop.test_step_log import record_traffic
from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.engine.loop.step_log import LogHeader, StepLog, StepRecord, plain_plan, read_log
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.lab.simulate.fleet import Fleet, SimulatedEngine
from tokenmill.lab.simulate.lifetimes import Outcome, jain, side_by_side
from tokenmill.lab.simulate.replay import RecordedExecutor
from tokenmill.lab.simulate.simulation import Simulation, each_policy, run_recorded
from tokenmill.lab.simulate.step_model import KNOTS, StepModel
from tokenmill.lab.simulate.times import recorded_run
from tokenmill.lab.simulate.traces import Arrival, TraceOptions, at_speed, read_trace
from tokenmill.serving.replicas.routing.policies import policy_of

SEED = seed_for(__name__)
MODEL = StepModel(
    fixed=0.01,
    rates=[0.0005] * len(KNOTS),
    terms=[0.0001, 0.0, 1e-7, 1e-8, 0.0],
    largest=[512, 64, 64, 10**6, 10**7, 1000],
    ratios=np.linspace(0.8, 1.2, 101).tolist(),
    error=0.1,
    num_steps=0,
)


class KeepingExecutor(RecordedExecutor):
    """Keeps the plans."""

    def __init__(self, records: list[StepRecord]) -> None:
        super().__init__(records)
        self.plans: list[dict[str, Any]] = []

    def launch(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plain_plan(plan))
        return super().launch(plan)


def with_random_seconds(path: Path) -> list[float]:
    """Give the records of a log other seconds; returns them."""
    header, stored = read_log(path)
    records = list(stored)
    source = random.Random(SEED)
    for record in records:
        record.seconds = (source.random(), source.random(), source.random())
        record.rest = source.random()
    with StepLog(path, header) as log:
        for record in records:
            log._write(record)
    return [record.rest + sum(record.seconds) for record in records]


def simulation(num_pages: int = 600, num_engines: int = 1, seed: int | None = 0, **policies: str) -> Simulation:
    header = LogHeader(
        scheduler=SchedulerConfig(16, 128, **policies),
        num_pages=num_pages,
        page_size=16,
        enable_prefix_caching=True,
        max_model_len=8192,
        vocab_size=1000,
        eos_token_ids=[],
        depth=1,
    )
    return Simulation(header=header, model=MODEL, num_engines=num_engines, seed=seed)


def conversations(
    folder: Path, count: int = 60, block_size: int = 32
) -> tuple[list[Arrival], list[tuple[list[int], int]]]:
    """A trace in Mooncake's form, whose blocks have 32 tokens; with the hashes and the length of each prompt."""
    source, prompts, lines, now = random.Random(SEED), [], [], 0
    fresh = itertools.count(10)
    for number in range(count):
        now += source.randint(0, 400)
        before = list(source.choice(prompts)[0][:-1]) if prompts and source.random() < 0.7 else [source.randrange(3)]
        hashes = before[:8] + [next(fresh) for _ in range(source.randint(1, 4))]
        length = (len(hashes) - 1) * block_size + source.randint(1, block_size)
        prompts.append((hashes, length))
        lines.append(
            {"timestamp": now, "input_length": length, "output_length": source.randint(1, 12), "hash_ids": hashes,
             "tenant": f"t{number % 3}"}
        )  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_trace(path, TraceOptions(vocab_size=1000, block_size=block_size)), prompts


def moments(outcome: Outcome) -> list[tuple[float, list[float], float | None]]:
    return [(lifetime.arrived, lifetime.times, lifetime.end) for lifetime in outcome.lifetimes.values()]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [12, 80])
def test_a_recorded_run_comes_out_again_with_its_latencies(tmp_path: Path, depth: int, num_pages: int) -> None:
    harness = Harness(
        depth=depth, num_pages=num_pages, budget=10, policy="fcfs", admission="optimistic", log=tmp_path / "log"
    )
    source = random.Random(SEED)
    arrived: dict[str, int] = {}
    brought: dict[str, list[int]] = {}
    num_turns = 0

    def step() -> None:
        nonlocal num_turns
        before = {one: len(record.tokens) for one, record in harness.records.items()}
        num_turns += harness.engine.has_work
        harness.step()
        for one, record in harness.records.items():
            brought.setdefault(one, []).extend([num_turns] * (len(record.tokens) - before[one]))

    for _ in range(25):
        prompt = [source.randrange(40) for _ in range(source.randint(1, 12))]
        arrived[harness.add(prompt, source.randint(4, 12))] = num_turns
        for _ in range(source.randint(0, 2)):
            step()
    while harness.engine.has_work:
        step()
    harness.engine.close()
    assert (harness.scheduler.state.num_preemptions > 0) == (num_pages == 12), f"seed {SEED}"
    clock = np.concatenate([[0.0], np.cumsum(with_random_seconds(tmp_path / "log"))])

    outcome = run_recorded(tmp_path / "log")
    assert outcome.num_preemptions == harness.scheduler.state.num_preemptions
    assert outcome.num_steps == len(harness.runner.plans)
    for request_id, record in harness.records.items():
        lifetime = outcome.lifetimes[request_id]
        assert lifetime.arrived == pytest.approx(clock[arrived[request_id]]), f"seed {SEED}"
        assert lifetime.times == pytest.approx([clock[turn] for turn in brought[request_id]]), f"seed {SEED}"
        assert len(lifetime.times) == len(record.tokens)
        assert lifetime.end == lifetime.times[-1]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_plan_of_a_log_with_everything_in_it_is_made_again(tmp_path: Path, depth: int) -> None:
    record_traffic(tmp_path / "log", depth)
    header, records, inputs, times = recorded_run(tmp_path / "log")
    executor = KeepingExecutor(records)
    Fleet([SimulatedEngine(header, executor, times)], policy_of("fewest"), 0).run(inputs)
    assert executor.plans == [record.plan for record in records if record.plan is not None]


def test_a_log_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    record_traffic(tmp_path / "log", 1)
    data = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(TokenMillError, match="more iterations than the log"):
        run_recorded(tmp_path / "log")


def test_hits_are_those_of_the_hashes(tmp_path: Path) -> None:
    arrivals, prompts = conversations(tmp_path)
    outcome = simulation(num_pages=5000).run([Arrival(i * 100.0, *_rest(one)) for i, one in enumerate(arrivals)])
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for hashes, length in prompts:
        # Pages of 16 tokens of blocks of 32, as far as any prompt before went; never the last token.
        pages = [(*hashes[: place // 2 + 1], place % 2) for place in range(length // 16)]
        shared = len(list(itertools.takewhile(seen.__contains__, pages)))
        hits += min(shared, (length - 1) // 16) * 16
        seen.update(pages)
    assert outcome.hits == hits > 0, f"seed {SEED}"
    assert outcome.queried == sum(length for _, length in prompts)
    assert outcome.num_tokens == outcome.queried - hits + sum(one.num_output_tokens - 1 for one in arrivals)


def _rest(one: Arrival) -> tuple[Any, int, str, int]:
    return one.token_ids, one.num_output_tokens, one.tenant, one.priority


@pytest.mark.parametrize("num_engines", [1, 3])
def test_runs_repeat_bit_for_bit_and_other_seeds_differ(tmp_path: Path, num_engines: int) -> None:
    arrivals, _ = conversations(tmp_path)
    first, again, other = (simulation(num_engines=num_engines, seed=one).run(arrivals) for one in (1, 1, 7))
    assert moments(first) == moments(again)
    assert moments(first) != moments(other)
    assert first.summary() == again.summary()
    assert all(
        len(lifetime.times) == one.num_output_tokens
        for lifetime, one in zip(first.lifetimes.values(), arrivals, strict=True)
    )


def test_one_request_alone_takes_what_the_model_says(tmp_path: Path) -> None:
    arrival = Arrival(5.0, np.arange(100, dtype=np.int32), 3, "")
    [lifetime] = simulation(seed=None).run([arrival]).lifetimes.values()
    prefill = 0.01 + 0.0005 * 100 + 0.0001 + 1e-8 * 5050
    decodes = [0.01 + 0.0005 + 0.0001 + 1e-7 * keys for keys in (101, 102)]
    assert lifetime.times == pytest.approx(5.0 + np.cumsum([prefill, *decodes]))


def test_overlapped_steps_follow_each_other_without_a_gap() -> None:
    own = simulation(seed=None)
    own.header.depth = 2
    [lifetime] = own.run([Arrival(0.0, np.arange(100, dtype=np.int32), 4, "")]).lifetimes.values()
    [plain] = simulation(seed=None).run([Arrival(0.0, np.arange(100, dtype=np.int32), 4, "")]).lifetimes.values()
    assert lifetime.times == pytest.approx(plain.times), "one request cannot overlap with itself"


def test_several_engines_share_the_load_and_prefixes_stay_together(tmp_path: Path) -> None:
    arrivals = at_speed(conversations(tmp_path, count=90)[0], 20.0)
    one, three = simulation(seed=None).run(arrivals), simulation(num_engines=3, seed=None).run(arrivals)
    assert {lifetime.engine for lifetime in three.lifetimes.values()} == {0, 1, 2}
    assert three.seconds < one.seconds, f"seed {SEED}"
    assert three.hits > 0


def test_policies_are_put_side_by_side(tmp_path: Path) -> None:
    arrivals = at_speed(conversations(tmp_path)[0], 40.0)
    own = simulation(num_pages=60)
    choices = list(
        each_policy({"policy": ["fair", "fcfs"], "batch_policy": [], "admission": ["reserve", "optimistic"]})
    )
    outcomes = [own.with_policies(fields).run(arrivals) for fields in choices]
    assert [one.name for one in outcomes] == [
        "fair/mixed/reserve", "fair/mixed/optimistic", "fcfs/mixed/reserve", "fcfs/mixed/optimistic"
    ]  # fmt: skip
    assert outcomes[0].num_preemptions == outcomes[2].num_preemptions == 0
    assert len({tuple(one.ttft) for one in outcomes}) > 1
    table = side_by_side(outcomes)
    for word in (
        "preemptions",
        "fairness (Jain)",
        "ms to first token, p99",
        "ms between tokens, p50",
        *(one.name for one in outcomes),
    ):
        assert word in table


def test_a_policy_of_ones_own_is_found_by_its_module(tmp_path: Path) -> None:
    arrivals, _ = conversations(tmp_path)
    own = simulation(policy="tokenmill.engine.scheduler.policies:FirstComeFirstServed")
    plain = simulation(policy="fcfs")
    assert moments(own.run(arrivals)) == moments(plain.run(arrivals))
    with pytest.raises(InvalidConfig, match="fastest"):
        simulation(policy="fastest").run(arrivals)


def test_a_step_beyond_the_model_ends_the_simulation_unless_it_may_guess() -> None:
    arrival = Arrival(0.0, np.arange(6000, dtype=np.int32) % 1000, 1, "")
    own = simulation()
    own.model.largest[0] = 50
    try:
        with pytest.raises(InvalidConfig, match="128 tokens, the step model was fitted to at most 50"):
            own.run([arrival])
        guessing = Simulation(header=own.header, model=own.model, is_bound=False)
        assert len(guessing.run([arrival]).ttft) == 1
    finally:
        own.model.largest[0] = 512


def test_a_request_that_can_never_run_is_an_error(tmp_path: Path) -> None:
    outcome = simulation().run([Arrival(0.0, np.zeros(9000, np.int32), 1, "")])
    assert outcome.summary()["errors"] == 1
    assert outcome.summary()["ttft"] is None
    assert "-" in side_by_side([outcome])


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) == 1.0
