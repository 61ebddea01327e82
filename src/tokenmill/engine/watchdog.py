"""The watchdog: says so, once, when requests could go on and do not, and leaves the last steps for whoever looks."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import msgspec

from tokenmill.engine.step_log import StepLog

logger = logging.getLogger(__name__)


class Watchdog:
    """Writes the recent step records to a file the first time the scheduler is stuck."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or Path(tempfile.gettempdir())) / f"tokenmill-stuck-{os.getpid()}.jsonl"
        self._has_reported = False

    def report(self, log: StepLog) -> None:
        """Requests are ready, pages and budget are there, nothing is launched, and no plan was made: a bug."""
        if self._has_reported:
            return
        self._has_reported = True
        logger.error("no request makes progress although some could; the last steps are in %s", self._path)
        try:
            with self._path.open("wb") as file:
                for record in log.recent():
                    file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            logger.error("the last steps could not be written to %s: %s", self._path, error)
