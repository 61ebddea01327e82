"""The outcome of a benchmark: summaries of samples, facts about the machine, and the JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.cli.version import versions

PERCENTILES = (50, 90, 99)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed, between two samples by interpolation.

    Raises:
        IndexError: there are no samples.
    """
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(samples: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 in the samples' own unit; None without samples."""
    if not samples:
        return None
    return {"mean": statistics.fmean(samples), **{f"p{p}": percentile(samples, p) for p in PERCENTILES}}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the repeats of one measurement."""
    return {"median": statistics.median(samples), "lowest": min(samples), "highest": max(samples)}


def machine_facts() -> dict[str, Any]:
    """Versions, processor and cores, and the load that others put on them."""
    return {**versions(), "processor": _processor(), "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident, mapped files included."""
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
