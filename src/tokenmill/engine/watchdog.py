"""The watchdog: says so, once, when requests could go on and do not, and leaves the last steps for whoever looks."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import msgspec

from tokenmill.engine.step_log import StepLog

logger = logging.getLogger(__name__)


class Watchdog:
    """Writes the recent step records to a file the first time the scheduler is stuck."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._has_reported = False

    def report(self, log: StepLog) -> None:
        """Requests are ready, pages and budget are there, nothing is launched, and no plan was made: a bug."""
        if self._has_reported:
            return
        self._has_reported = True
        logger.error("no request makes progress although some could")
        try:
            # A name that nobody can guess: the folder is everybody's.
            number, path = tempfile.mkstemp(prefix="tokenmill-stuck-", suffix=".jsonl", dir=self._folder)
            with open(number, "wb") as file:
                for record in log.recent():
                    file.write(msgspec.json.encode(record) + b"\n")
            logger.error("the last steps are in %s", path)
        except OSError as error:
            logger.error("the last steps could not be written: %s", error.strerror)
