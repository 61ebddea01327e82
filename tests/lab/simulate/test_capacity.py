"""Plans: limits are read, and the load or the engines are found at the edge where they are just kept."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lab.simulate.test_fleet import simulation
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.lab.simulate.capacity import Limit, fewest_engines, most_load, parse_limits, trials_table
from tokenmill.lab.simulate.traces import Arrival


def stream(count: int = 80, rate: float = 2.0) -> list[Arrival]:
    """Prompts of 64 tokens and answers of 4, evenly spread."""
    return [Arrival(i / rate, np.arange(i, i + 64, dtype=np.int32), 4, "") for i in range(count)]


def test_limits_are_read() -> None:
    assert parse_limits("ttft_p99<1s, itl_p50 < 100ms,e2e_mean<2.5s") == [
        Limit("ttft", "p99", 1.0),
        Limit("itl", "p50", 0.1),
        Limit("e2e", "mean", 2.5),
    ]


@pytest.mark.parametrize(
    "text", ["", "ttft_p99", "ttft_p99<1", "ttft_p98<1s", "speed_p99<1s", "ttft_p99<0s", "itl_p99<1.2.3s"]
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--slo"):
        parse_limits(text)


def test_the_most_load_is_found_from_either_side() -> None:
    own, limits = simulation(seed=None), parse_limits("ttft_p99<200ms")
    found = []
    for rate in (0.5, 500.0):
        trials = most_load(own, stream(rate=rate), limits)
        kept = [one for one in trials if one.is_kept]
        broken = [one for one in trials if not one.is_kept]
        assert max(one.summary["ttft"]["p99"] for one in kept) < 0.2
        assert min(one.summary["ttft"]["p99"] for one in broken) >= 0.2
        best, next_best = max(one.rate for one in kept), min(one.rate for one in broken)
        assert best < next_best < best * 1.03
        found.append(best)
        assert "ttft p99 ms" in trials_table(trials, limits)
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_the_fewest_engines_are_found() -> None:
    arrivals, limits = stream(rate=60.0), parse_limits("ttft_p99<200ms")
    trials = fewest_engines(simulation(seed=None), arrivals, limits, most=16)
    needed = min(one.num_engines for one in trials if one.is_kept)
    assert needed > 1
    assert any(one.num_engines == needed - 1 and not one.is_kept for one in trials)


def test_what_nothing_keeps_is_said() -> None:
    with pytest.raises(TokenMillError, match="breaks them at any load"):
        most_load(simulation(), stream(4), parse_limits("ttft_p50<1ms"))
    with pytest.raises(TokenMillError, match="keeps the limits at any load"):
        most_load(simulation(), stream(4), parse_limits("ttft_p50<1000s"))
    with pytest.raises(TokenMillError, match="3 engines are too few"):
        fewest_engines(simulation(), stream(4), parse_limits("ttft_p50<1ms"), most=3)
