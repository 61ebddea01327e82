"""The time of a step: fitted, held to what it knows, and drawn by key."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.loop.test_step_log import record_traffic
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.engine.loop.step_log import StepRecord, read_log
from tokenmill.lab.simulate.step_model import (
    KNOTS,
    StepModel,
    StepSize,
    describe,
    fit,
    read_step_model,
    recorded_steps,
)

SEED = seed_for(__name__)


def roofline(size: StepSize) -> float:
    """Return the times to be found again: the weights' bytes until operations take longer, and attention's reads."""
    return max(0.020, 0.004 + size.tokens * 0.0005) + 2e-7 * size.keys + 3e-8 * size.pairs + 1e-5 * size.sampled


def some_size(source: random.Random, most: int = 512) -> StepSize:
    decodes, chunk = source.randint(0, 32), source.choice([0, 0, source.randint(1, most - 32)])
    keys = sum(source.randint(1, 1000) for _ in range(decodes))
    tokens = max(1, decodes + chunk)
    return StepSize(tokens, max(1, decodes), max(1, decodes), keys, chunk * source.randint(0, 1000), 2 + chunk // 16)


def noisy_steps(noise: float, count: int = 900) -> list[tuple[StepSize, float]]:
    source = random.Random(SEED)
    sizes = [some_size(source) for _ in range(count)]
    return [(size, roofline(size) * (1 + noise * source.uniform(-1, 1))) for size in sizes]


def test_a_roofline_is_found_again() -> None:
    model = fit(noisy_steps(0.0))
    assert model.error < 0.02, f"seed {SEED}"
    source = random.Random(SEED + 1)
    for size in (some_size(source) for _ in range(100)):
        assert model.seconds(size) == pytest.approx(roofline(size), rel=0.05), f"seed {SEED}: {size}"


def test_the_error_is_that_of_steps_that_were_held_out() -> None:
    model = fit(noisy_steps(0.2))
    assert 0.06 < model.error < 0.15, f"seed {SEED}: noise of +-20% is 10% on average"
    assert 0.7 < model.ratios[0] < 0.9
    assert 1.1 < model.ratios[-1] < 1.35
    assert "900 steps" in describe(model)


def test_what_is_drawn_depends_on_the_key_alone_and_is_spread_as_the_errors_were() -> None:
    model = fit(noisy_steps(0.2))
    size = StepSize(20, 20, 20, 2000, 0, 1)
    drawn = [model.drawn_seconds(size, key) for key in range(2000)]
    assert drawn == [model.drawn_seconds(size, key) for key in range(2000)]
    assert len(set(drawn)) > 1900
    assert np.mean(drawn) == pytest.approx(model.seconds(size) * np.mean(model.ratios), rel=0.01)


@pytest.mark.parametrize("name", ["tokens", "requests", "sampled", "keys", "pairs"])
def test_a_step_beyond_what_is_known_is_refused(name: str) -> None:
    model = fit(noisy_steps(0.0))
    most = dict(zip(StepSize.__struct_fields__, model.largest, strict=True))
    model.check_domain(StepSize(**most))
    model.check_domain(StepSize(**{**most, name: int(1.5 * most[name])}))
    with pytest.raises(InvalidConfig, match=f"{name}, the step model was fitted to at most {most[name]:,}: .*--beyond"):
        model.check_domain(StepSize(**{**most, name: int(1.5 * most[name]) + 1}))


def test_the_rate_has_a_slope_on_each_stretch() -> None:
    rates = [float(place) for place in range(len(KNOTS))]
    model = StepModel(
        fixed=1.0, rates=rates, terms=[0.0] * 5, largest=[0] * 6, ratios=[1.0] * 101, error=0, num_steps=0
    )
    ends = [*KNOTS[1:], 20_000]
    wanted = 1.0
    for start, end, rate in zip(KNOTS, ends, rates, strict=True):
        wanted += rate * (end - start)
        assert model.seconds(StepSize(end, 0, 0, 0, 0, 0)) == pytest.approx(wanted)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_log_has_a_time_for_each_step_that_ended_well(tmp_path: Path, depth: int) -> None:
    harness = record_traffic(tmp_path / "log", depth)
    _, records = read_log(tmp_path / "log")
    steps = list(recorded_steps(records))
    sizes = {plan.step: StepSize.from_plan(plan) for plan in harness.runner.plans}
    assert 20 < len(steps) <= len(sizes)
    assert all(size in sizes.values() and seconds > 0.0 for size, seconds in steps)


def test_sizes_count_keys_and_pairs() -> None:
    plan = {"num_computed": [9, 4], "num_scheduled": [1, 3], "num_samples": [1, 0], "page_ids": [7]}
    assert StepSize.of_record(plan) == StepSize(tokens=4, requests=2, sampled=1, keys=10, pairs=5 + 6 + 7, pages=1)


def test_overlapping_steps_have_the_time_between_their_ends() -> None:
    plan = {"num_computed": [0], "num_scheduled": [1], "num_samples": [1], "page_ids": [], "request_ids": ["0"]}
    records = [
        StepRecord(plan={**plan, "step": 1}, seconds=(1.0, 0.0, 0.0)),
        StepRecord(plan={**plan, "step": 2}, committed=1, seconds=(0.0, 4.0, 1.0)),
        StepRecord(committed=2, seconds=(0.0, 3.0, 0.0)),
    ]
    assert [seconds for _, seconds in recorded_steps(records)] == [6.0, 3.0]


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    model = fit(noisy_steps(0.1))
    path = tmp_path / "steps.json"
    path.write_bytes(msgspec.json.encode(model))
    assert read_step_model(path) == model
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(model, rates=[1.0])))
    with pytest.raises(TokenMillError, match="is not a step model"):
        read_step_model(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(model, version=99)))
    with pytest.raises(TokenMillError, match="version 99"):
        read_step_model(path)
    path.write_text("{}")
    with pytest.raises(TokenMillError, match="is not a step model"):
        read_step_model(path)
    with pytest.raises(TokenMillError, match="cannot read"):
        read_step_model(tmp_path / "none")


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(TokenMillError, match="29 steps are too few"):
        fit(noisy_steps(0.0, 29))
