"""Show Prometheus metrics of batches: lines that wait and run, and how lines have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class BatchCollector(Collector):
    """A collector that reads the numbers at the moment of a scrape."""

    def __init__(self, prefix: str, lines: Callable[[], Mapping[str, int]], ended: Mapping[str, int]) -> None:
        """Collect `lines` by state and `ended` by outcome; both have a closed set of labels."""
        self._prefix = prefix
        self._lines = lines
        self._ended = ended

    def collect(self) -> Iterator[Metric]:
        """Yield the number of open lines by state and of ended lines by outcome."""
        gauge = GaugeMetricFamily(f"{self._prefix}:batch_lines", "Lines of open batches", labels=["state"])
        for state, count in self._lines().items():
            gauge.add_metric([state], count)
        yield gauge
        help = "Lines of batches that have ended"
        counter = CounterMetricFamily(f"{self._prefix}:batch_lines_ended", help, labels=["outcome"])
        for outcome, count in self._ended.items():
            counter.add_metric([outcome], count)
        yield counter
