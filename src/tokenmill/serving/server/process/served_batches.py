"""Run the batches of a server, from opening their folder at the start to stopping the runner before the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.batches.runner import BatchRunner
from tokenmill.serving.batches.service import BatchLimits, BatchService
from tokenmill.serving.batches.storage import Storage
from tokenmill.serving.observe.batch_metrics import BatchCollector
from tokenmill.serving.observe.metrics import PREFIX, Metrics
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.openai.batches import LineAnswers


class ServedBatches:
    """The batches of a server; call `start`, `stop` and `close` in this order.

    Attributes:
        service: the service that the routes use.
    """

    def __init__(self, config: ServerConfig, is_busy: Callable[[], bool], metrics: Metrics) -> None:
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
        metrics.show(BatchCollector(PREFIX, lambda: runner.lines, runner.ended))

    def start(self, context: ServerContext, num_slots: int) -> None:
        """Continue the open batches and answer new ones, `num_slots` lines at a time."""
        self._running = asyncio.ensure_future(self._runner.run(LineAnswers(context).answer, num_slots))

    async def stop(self) -> None:
        """Stop running lines; all answers so far are on disk afterwards."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def close(self) -> None:
        """Close the storage when no route needs it any more."""
        await self.stop()
        self._storage.close()
