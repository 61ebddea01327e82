"""Return the engine's numbers as `LLM.get_metrics` gives them, in vLLM's three kinds of metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.serving.observe.engine_metrics import engine_metrics
from tokenmill.serving.replicas.engine_handle import EngineHandle


class Metric(msgspec.Struct, frozen=True):
    """A name with labels."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True):
    """A number that only grows."""

    value: int


class Gauge(Metric, frozen=True):
    """A number at the present moment."""

    value: float


class Histogram(Metric, frozen=True):
    """The number of values, their sum, and how many were at most each bound (`buckets`, by bound)."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(ready: EngineReady, stats: EngineStats, prefix: str) -> Iterator[Metric]:
    """Yield all metrics of an engine, named as at the server's /metrics, without Prometheus' `_total`."""
    engine = EngineHandle(0, lambda _: None, ())
    engine.ready, engine.stats = ready, stats
    for family in engine_metrics([engine], prefix):
        buckets: dict[str, int] = {}
        for sample in family.samples:
            if family.type == "counter":
                yield Counter(family.name, sample.labels, int(sample.value))
            elif family.type != "histogram":
                yield Gauge(family.name, sample.labels, sample.value)
            elif sample.name.endswith("_bucket"):
                buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name.endswith("_sum"):  # the last one of its labels
                yield Histogram(family.name, sample.labels, buckets["+Inf"], sample.value, buckets)
                buckets = {}
