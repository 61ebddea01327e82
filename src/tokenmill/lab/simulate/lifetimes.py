"""Record the lifetime of each request in a simulation, and summarize them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Lifetime:
    """One request; moments in seconds from the start.

    Attributes:
        engine: the engine that ran it.
        times: the moment of each output token.
        end: the moment of its end; None: it never ended.
        error: the reason why it failed.
    """

    tenant: str
    arrived: float
    engine: int
    num_prompt_tokens: int
    times: list[float] = field(default_factory=list)
    end: float | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A whole run.

    Attributes:
        name: of its policies.
        lifetimes: by request id, in the order of arrival.
        seconds: from the first arrival to the last end.
        num_steps, num_tokens: run by engines; tokens that the prefix cache supplied are not counted.
        busy: seconds in which each engine ran steps.
        queried, hits: prompt tokens that caches were asked for, and those they had.
    """

    name: str = ""
    lifetimes: dict[str, Lifetime]
    seconds: float
    num_steps: int
    num_tokens: int
    num_preemptions: int
    busy: list[float]
    queried: int
    hits: int

    @property
    def ttft(self) -> list[float]:
        """Seconds to the first token, for each request that got one."""
        return [lifetime.times[0] - lifetime.arrived for lifetime in self.lifetimes.values() if lifetime.times]

    @property
    def itl(self) -> npt.NDArray[np.float64]:
        """Seconds between one output token and the next, of all requests."""
        gaps = [np.diff(lifetime.times) for lifetime in self.lifetimes.values() if len(lifetime.times) > 1]
        return np.concatenate(gaps) if gaps else np.zeros(0)

    @property
    def e2e(self) -> list[float]:
        """Seconds to the end, for each request that ended without an error."""
        return [
            lifetime.end - lifetime.arrived
            for lifetime in self.lifetimes.values()
            if lifetime.end is not None and lifetime.error is None
        ]

    def summary(self) -> dict[str, Any]:
        """Return plain numbers, for JSON; in seconds unless the name says otherwise. An empty distribution is None."""
        num_output = sum(len(lifetime.times) for lifetime in self.lifetimes.values())
        span = max(self.seconds, 1e-9)
        return {
            "policies": self.name,
            "requests": len(self.lifetimes),
            "errors": sum(lifetime.error is not None for lifetime in self.lifetimes.values()),
            "seconds": self.seconds,
            "steps": self.num_steps,
            "tokens_run": self.num_tokens,
            "output_tokens_per_second": num_output / span,
            "requests_per_second": len(self.e2e) / span,
            "busy": float(np.mean(self.busy)) / span,
            "prefix_hit_rate": self.hits / self.queried if self.queried else 0.0,
            "preemptions": self.num_preemptions,
            "fairness": self.fairness(),
            "ttft": distribution(self.ttft),
            "itl": distribution(self.itl),
            "e2e": distribution(self.e2e),
        }

    def fairness(self) -> float:
        """Return Jain's index (Jain, Chiu and Hawe 1984) of the tokens per second that each tenant got while it waited.

        1: all got the same; 1/n: one of n tenants got everything. A tenant's speed is that of its prompts' and outputs'
        tokens over the sum of its requests' seconds.
        """
        tokens: dict[str, int] = defaultdict(int)
        waited: dict[str, float] = defaultdict(float)
        for lifetime in self.lifetimes.values():
            if lifetime.end is not None and lifetime.error is None:
                tokens[lifetime.tenant] += lifetime.num_prompt_tokens + len(lifetime.times)
                waited[lifetime.tenant] += lifetime.end - lifetime.arrived
        return jain([tokens[one] / max(waited[one], 1e-9) for one in tokens])


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of shares that are at least 0; 1 if there are none."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def distribution(samples: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Return mean, p50, p90 and p99, as the benchmarks have them; None without samples."""
    if len(samples) == 0:
        return None
    quantiles = np.percentile(samples, PERCENTILES).tolist()
    names = (f"p{percent}" for percent in PERCENTILES)
    return {"mean": float(np.mean(samples)), **dict(zip(names, quantiles, strict=True))}


def side_by_side(outcomes: Sequence[Outcome]) -> str:
    """Return a table: a column for each run, a row for each figure."""
    summaries = [outcome.summary() for outcome in outcomes]
    rows = [("", [one.name for one in outcomes])]
    for label, name, form in (
        ("requests", "requests", ",d"),
        ("errors", "errors", ",d"),
        ("seconds in all", "seconds", ",.2f"),
        ("requests/s", "requests_per_second", ",.3f"),
        ("output tokens/s", "output_tokens_per_second", ",.1f"),
        ("engines are busy", "busy", ".1%"),
        ("tokens run", "tokens_run", ",d"),
        ("prompts from cache", "prefix_hit_rate", ".1%"),
        ("preemptions", "preemptions", ",d"),
        ("fairness (Jain)", "fairness", ".3f"),
    ):
        rows.append((label, [format(one[name], form) for one in summaries]))
    for label, name in (("to first token", "ttft"), ("between tokens", "itl"), ("to the end", "e2e")):
        for figure in ("mean", *(f"p{percent}" for percent in PERCENTILES)):
            cells = ["-" if one[name] is None else f"{one[name][figure] * 1e3:,.1f}" for one in summaries]
            rows.append((f"ms {label}, {figure}", cells))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(outcomes))]
    return "\n".join(
        f"{label:<25}" + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    )
