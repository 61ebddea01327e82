"""The figures of a benchmark's document, each with its range: of the repeats, or the 95% interval from the requests."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.whole_file import whole_file
from tokenmill.lab.bench.report import PERCENTILES

DISTRIBUTIONS = ("ttft", "time_per_output_token", "inter_token", "e2e")


class Figure(msgspec.Struct, frozen=True):
    """One figure; its name ends with its unit, preceded by its batch where there are several.

    Attributes:
        low: the lower end of its range; None: the range has none.
        high: the upper end. Without both ends the range is unknown.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def has_range(self) -> bool:
        """True if at least one end of the range is known."""
        return self.low is not None or self.high is not None

    @property
    def higher_is_better(self) -> bool:
        """True for rates, False for times, bytes and errors."""
        return self.name.endswith("_per_second")

    def overlaps(self, other: Figure) -> bool:
        """Return True if the ranges share a value; a figure without a range is a range of its value alone."""
        (low, high), (other_low, other_high) = self._range(), other._range()
        return max(low, other_low) <= min(high, other_high)

    def _range(self) -> tuple[float, float]:
        if not self.has_range:
            return self.value, self.value
        return -inf if self.low is None else self.low, inf if self.high is None else self.high


def figures(document: Mapping[str, Any]) -> list[Figure]:
    """Return all figures of a document of `bench throughput`, `latency` or `serve`.

    Raises:
        LookupError, TypeError, ValueError: it is no such document, or an incomplete one.
    """
    readers = {"throughput": _throughput, "latency": _latency, "serve": _serve}
    return list(readers[document["benchmark"]](document))


def write_figures(path: str, document: Mapping[str, Any]) -> None:
    """Write them as CSV: figure, value, low, high.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(Path(path)) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("figure", "value", "low", "high"))
        rows.writerows((one.name, one.value, one.low, one.high) for one in figures(document))


def _throughput(document: Mapping[str, Any]) -> Iterator[Figure]:
    for name in ("output_tokens_per_second", "total_tokens_per_second"):
        yield Figure(name, float(document[name]), *_extremes([float(run[name]) for run in document["runs"]]))
    yield _peak_memory(document)


def _latency(document: Mapping[str, Any]) -> Iterator[Figure]:
    repeated = int(document["workload"]["num_iters"]) > 1
    for point in document["points"]:
        batch = f"{point['batch_size']} x {point['input_len']}"
        for phase, seconds in (("prefill", "prefill_seconds"), ("decode", "decode_step_seconds")):
            times = point[seconds]
            median, lowest, highest = (float(times[name]) for name in ("median", "lowest", "highest"))
            yield Figure(f"{batch} {seconds}", median, *((lowest, highest) if repeated else ()))
            name = f"{phase}_tokens_per_second"
            rate = float(point[name])
            ends = (rate * median / highest, rate * median / lowest) if repeated else ()
            yield Figure(f"{batch} {name}", rate, *ends)
        yield _of_distribution(f"{batch} decode_step", point["decode_step_seconds"], "p99")
    yield _peak_memory(document)


def _serve(document: Mapping[str, Any]) -> Iterator[Figure]:
    for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
        yield Figure(name, float(document[name]))
    for name in DISTRIBUTIONS:
        distribution = document[f"{name}_seconds"]
        for statistic in ("mean", *(f"p{percent}" for percent in PERCENTILES)) if distribution else ():
            yield _of_distribution(name, distribution, statistic)
    yield Figure("errors", float(sum(document["errors"].values())))


def _of_distribution(name: str, distribution: Mapping[str, Any], statistic: str) -> Figure:
    # Steps and pieces have no intervals, nor has anything in documents of older versions.
    low, high = distribution.get("intervals", {}).get(statistic, (None, None))
    value = float(distribution[statistic])
    return Figure(
        f"{name}_{statistic}_seconds", value, None if low is None else float(low), None if high is None else float(high)
    )


def _peak_memory(document: Mapping[str, Any]) -> Figure:
    return Figure("peak_memory_bytes", float(document["machine"]["peak_memory_bytes"]))


def _extremes(repeats: Sequence[float]) -> tuple[float, float] | tuple[()]:
    """Return the lowest and highest of the repeats; nothing for a single run, which has no spread."""
    return (min(repeats), max(repeats)) if len(repeats) > 1 else ()
