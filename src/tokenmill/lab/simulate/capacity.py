"""Find the load that engines carry within latency limits, or the engines that a load needs, by simulated bisection.

It assumes that more load is worse and more engines are better, though a figure near its limit may go up and down.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.lab.simulate.lifetimes import PERCENTILES
from tokenmill.lab.simulate.simulation import Simulation
from tokenmill.lab.simulate.traces import Arrival, at_speed

METRICS = ("ttft", "itl", "e2e")
FIGURES = ("mean", *(f"p{percent}" for percent in PERCENTILES))
UNITS = {"s": 1.0, "ms": 1e-3}
# The load is found as precisely as this.
PRECISION = 0.02
# Neither load is sought beyond: nothing carries it, or everything does.
LEAST_SPEED, MOST_SPEED = 2.0**-12, 2.0**12


class Limit(msgspec.Struct, frozen=True):
    """A latency limit, `ttft_p99<1s`: a figure of a distribution must be below `seconds`."""

    metric: str
    figure: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}_{self.figure}<{self.seconds:g}s"


class Trial(msgspec.Struct, frozen=True):
    """One simulated run.

    Attributes:
        speed: factor by which requests came faster than in the trace.
        rate: requests per second that came.
        is_kept: True if every limit was kept and no request failed.
    """

    speed: float
    rate: float
    num_engines: int
    is_kept: bool
    summary: dict[str, Any]


def parse_limits(text: str) -> list[Limit]:
    """Parse the limits of `ttft_p99<1s,itl_p99<100ms`.

    Raises:
        InvalidConfig: naming the part that is not a limit.
    """
    limits = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([a-z0-9]+)_([a-z0-9]+)\s*<\s*([0-9.]+)\s*(ms|s)\s*", part)
        if found is None or found[1] not in METRICS or found[2] not in FIGURES or not _is_positive(found[3]):
            raise InvalidConfig(
                f"--slo: {part.strip()!r} must be as ttft_p99<1s: one of {', '.join(METRICS)}, one of "
                f"{', '.join(FIGURES)}, and a time in s or ms"
            )
        limits.append(Limit(found[1], found[2], float(found[3]) * UNITS[found[4]]))
    return limits


def most_load(simulation: Simulation, arrivals: Sequence[Arrival], limits: Sequence[Limit]) -> list[Trial]:
    """Find the highest load within the limits; returns the runs by load, of which the last that keeps them decides.

    Raises:
        TokenMillError: no run keeps them, or all do.
    """

    def run(speed: float) -> Trial:
        return _try(simulation, at_speed(arrivals, speed), speed, limits)

    trials = [run(1.0)]
    step = 2.0 if trials[0].is_kept else 0.5
    while trials[-1].is_kept == trials[0].is_kept:
        speed = trials[-1].speed * step
        if not LEAST_SPEED <= speed <= MOST_SPEED:
            kept = "keeps the limits at any load: too short a trace" if trials[0].is_kept else "breaks them at any load"
            raise TokenMillError(f"this {kept}; simulate shows the figures")
        trials.append(run(speed))
    low, high = sorted(trial.speed for trial in trials[-2:])
    while high / low > 1 + PRECISION:
        trials.append(run((low * high) ** 0.5))
        low, high = (trials[-1].speed, high) if trials[-1].is_kept else (low, trials[-1].speed)
    return sorted(trials, key=lambda one: one.speed)


def fewest_engines(
    simulation: Simulation, arrivals: Sequence[Arrival], limits: Sequence[Limit], most: int
) -> list[Trial]:
    """Find the fewest engines within the limits; returns the runs by engines, of which the first to keep them decides.

    Raises:
        TokenMillError: `most` engines are too few.
    """

    def run(count: int) -> Trial:
        return _try(simulation.with_engines(count), arrivals, 1.0, limits)

    low, high = 0, 1  # too few, and perhaps enough
    trials = [run(high)]
    while not trials[-1].is_kept:
        if high == most:
            raise TokenMillError(f"{most} engines are too few to keep the limits")
        low, high = high, min(2 * high, most)
        trials.append(run(high))
    while high - low > 1:
        middle = (low + high) // 2
        trials.append(run(middle))
        low, high = (low, middle) if trials[-1].is_kept else (middle, high)
    return sorted(trials, key=lambda one: one.num_engines)


def trials_table(trials: Sequence[Trial], limits: Sequence[Limit]) -> str:
    """Return a table with a line for each trial: its load, its engines, each figure that has a limit."""
    figures = list(dict.fromkeys((limit.metric, limit.figure) for limit in limits))
    titles = ["requests/s", "engines", "busy", *(f"{metric} {figure} ms" for metric, figure in figures), "kept"]
    lines = ["  ".join(f"{title:>12}" for title in titles)]
    for one in trials:
        cells = [f"{one.rate:.3f}", f"{one.num_engines}", f"{one.summary['busy']:.1%}"]
        for metric, figure in figures:
            found = one.summary[metric]
            cells.append("-" if found is None else f"{found[figure] * 1e3:,.1f}")
        lines.append("  ".join(f"{cell:>12}" for cell in [*cells, "yes" if one.is_kept else "no"]))
    return "\n".join(lines)


def _try(simulation: Simulation, arrivals: Sequence[Arrival], speed: float, limits: Sequence[Limit]) -> Trial:
    summary = simulation.run(arrivals).summary()
    is_kept = summary["errors"] == 0 and all(_is_kept(limit, summary) for limit in limits)
    span = arrivals[-1].seconds - arrivals[0].seconds
    return Trial(speed, (len(arrivals) - 1) / span if span else float("inf"), simulation.num_engines, is_kept, summary)


def _is_kept(limit: Limit, summary: dict[str, Any]) -> bool:
    """Return True if a limit is kept; a figure without samples keeps every limit: one-token answers have no gaps."""
    found = summary[limit.metric]
    return found is None or found[limit.figure] < limit.seconds


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0.0
    except ValueError:
        return False
