"""Summarize a benchmark: statistics of samples, facts about the machine, and the JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any

from tokenmill.core.version import versions

PERCENTILES = (50, 90, 99)
# Of the standard normal law: 95% of it lie within as many deviations.
_Z95 = 1.96


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of the samples do not exceed, interpolated between two samples.

    Raises:
        IndexError: there are no samples.
    """
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(samples: Sequence[float]) -> dict[str, float] | None:
    """Return mean, p50, p90 and p99 in the samples' own unit; None without samples."""
    if not samples:
        return None
    return {"mean": statistics.fmean(samples), **{f"p{p}": percentile(samples, p) for p in PERCENTILES}}


def distribution_of_requests(samples: Sequence[float]) -> dict[str, Any] | None:
    """Return the distribution of samples of which each request has one, with `intervals`.

    Steps and pieces get no intervals: many come from one moment, and the interval would be far too narrow.
    """
    found = distribution(samples)
    return None if found is None else {**found, "intervals": intervals(samples)}


def intervals(samples: Sequence[float]) -> dict[str, list[float | None]]:
    """Return the 95% intervals of the mean and of each percentile, as if the samples were independent.

    The bounds of percentiles are samples, chosen by rank; None: too few samples for a bound on that side.
    """
    count, ordered = len(samples), sorted(samples)
    found: dict[str, list[float | None]] = {"mean": [None, None]}
    if count > 1:
        mean, margin = statistics.fmean(samples), _Z95 * statistics.stdev(samples) / sqrt(count)
        found["mean"] = [mean - margin, mean + margin]
    for percent in PERCENTILES:
        rank, margin = count * percent / 100, _Z95 * sqrt(count * percent * (100 - percent)) / 100
        low, high = floor(rank - margin), ceil(rank + margin) + 1
        found[f"p{percent}"] = [ordered[low - 1] if low >= 1 else None, ordered[high - 1] if high <= count else None]
    return found


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest of the repeats of one measurement."""
    return {"median": statistics.median(samples), "lowest": min(samples), "highest": max(samples)}


def machine_facts() -> dict[str, Any]:
    """Return versions, processor, cores, and the load from other programs."""
    return {**versions(), "processor": _processor(), "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident, mapped files included."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_document(document: dict[str, Any]) -> None:
    """Write the last line of stdout."""
    print(json.dumps(document))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
