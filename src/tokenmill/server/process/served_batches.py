"""The batches of a server, from the folder that is opened at the start to the runner that is stopped before the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tokenmill.batches.lines import Outcome
from tokenmill.batches.runner import BatchRunner
from tokenmill.batches.service import BatchLimits, BatchService
from tokenmill.batches.storage import Storage
from tokenmill.config import ServerConfig
from tokenmill.observe.batch_metrics import BatchCollector
from tokenmill.observe.metrics import PREFIX, Metrics
from tokenmill.server.context import ServerContext
from tokenmill.server.openai.batches import LineAnswers


class ServedBatches:
    """`prepare`, `start`, `stop` and `close`, in this order; any of them may be the last but `close`.

    Attributes:
        service: what the routes use, once it is prepared.
    """

    service: BatchService

    def __init__(self, config: ServerConfig) -> None:
        """
        Raises:
            InvalidConfig: the folder cannot be used.
        """
        assert config.batch_dir is not None, "a server without a folder has no batches"
        self._storage = Storage(Path(config.batch_dir))
        self._limits = BatchLimits(config.batch_max_bytes, config.batch_max_files)
        self._running: asyncio.Task[None] | None = None

    def prepare(self, is_busy: Callable[[], bool], num_rows: int, metrics: Metrics) -> None:
        """The engines are there, with so many rows: half of them are for lines at most."""
        runner = self._runner = BatchRunner(self._storage, is_busy, max(1, num_rows // 2))
        self.service = BatchService(self._storage, self._limits, runner)

        def lines() -> dict[str, int]:
            return {"queued": max(0, runner.num_unanswered - runner.num_running), "running": runner.num_running}

        def ended() -> dict[str, int]:
            return {outcome.value: runner.ended[outcome] for outcome in Outcome}

        metrics.show(BatchCollector(PREFIX, lines, ended))

    def start(self, context: ServerContext) -> None:
        """Go on with what is open, and answer what comes."""
        self._running = asyncio.ensure_future(self._runner.run(LineAnswers(context).answer))

    async def stop(self) -> None:
        """Run no line any more; what has been answered is on the disk then."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def close(self) -> None:
        """Nobody asks any more."""
        await self.stop()
        self._storage.close()
