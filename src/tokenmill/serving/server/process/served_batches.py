"""Run the batches of a server, from opening their folder at the start to stopping the runner before the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.batches.runner import Answer, BatchRunner
from tokenmill.serving.batches.service import BatchLimits, BatchService
from tokenmill.serving.batches.storage import Storage
from tokenmill.serving.observe.metrics import PREFIX


class ServedBatches:
    """The batches of a server; call `start`, `stop` and `close` in this order.

    Attributes:
        service: the service that the routes use.
        collector: counts lines for /metrics.
    """

    def __init__(self, config: ServerConfig, is_busy: Callable[[], bool]) -> None:
        """
        Args:
            is_busy: returns True while interactive requests wait.

        Raises:
            InvalidConfig: the folder cannot be used.
        """
        assert config.batch_dir is not None, "a server without a folder has no batches"
        self._storage = Storage(Path(config.batch_dir))
        runner = self._runner = BatchRunner(self._storage, is_busy)
        limits = BatchLimits(config.batch_max_bytes, config.batch_max_files)
        self.service = BatchService(self._storage, limits, runner)
        self._running: asyncio.Task[None] | None = None
        self.collector = BatchCollector(PREFIX, lambda: runner.lines, runner.ended)

    def start(self, answer: Answer, num_slots: int) -> None:
        """Continue the open batches and answer new ones, `num_slots` lines at a time."""
        self._running = asyncio.ensure_future(self._runner.run(answer, num_slots))

    async def stop(self) -> None:
        """Stop running lines; all answers so far are on disk afterwards."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def close(self) -> None:
        """Close the storage when no route needs it any more."""
        await self.stop()
        self._storage.close()


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
