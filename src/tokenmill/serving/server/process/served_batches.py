"""The batches of a server, from the folder that is opened at the start to the runner that is stopped before the end."""

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
    """`start`, `stop` and `close`, in this order.

    Attributes:
        service: what the routes use.
    """

    def __init__(self, config: ServerConfig, is_busy: Callable[[], bool], metrics: Metrics) -> None:
        """
        Args:
            is_busy: whether somebody interactive waits.

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
        """Go on with what is open, and answer what comes, so many lines at a time."""
        self._running = asyncio.ensure_future(self._runner.run(LineAnswers(context).answer, num_slots))

    async def stop(self) -> None:
        """Run no line any more; what has been answered is on the disk then."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def close(self) -> None:
        """Nobody asks any more."""
        await self.stop()
        self._storage.close()
