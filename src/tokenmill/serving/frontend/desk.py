"""Prepare messages in one thread of a text worker, and publish the current stage and request on the work page."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.serving.frontend.attempt import Attempt
from tokenmill.serving.frontend.prompt_processor import Prepared, Question, ids_of
from tokenmill.serving.replicas.work_page import WorkPage

Prepare = Callable[[Question, Attempt], Prepared]


class Desk:
    """Prepares messages, using one line of the `WorkPage` and, outside the loop's thread, one job of the heartbeat."""

    def __init__(self, prepare: Prepare, page: WorkPage, line: int, seconds: float) -> None:
        """
        Args:
            prepare: see `PromptProcessor.prepare`.
            line: the line of the page; each desk has its own.
            seconds: see `Attempt`.
        """
        self._prepare = prepare
        self._page = page
        self._line = line
        self._seconds = seconds

    def prepare(self, message: Question, is_hurried: bool = False) -> Prepared:
        """Prepare a message and return the result.

        Raises:
            TakesLong: a hurried attempt is not enough for it.
        """
        first = ids_of(message)[0]
        attempt = Attempt(self._seconds, is_hurried, lambda did: self._page.write(self._line, did, first))
        attempt.note("prepared")
        try:
            return self._prepare(message, attempt)
        finally:
            self._page.clear(self._line)

    def watched(self, heartbeat: Heartbeat, job: str, patience: float) -> Callable[[Question], Prepared]:
        """Return `prepare` for a thread of its own, reported to the heartbeat as `job`."""

        def work(message: Question) -> Prepared:
            heartbeat.begin(job, patience, thread=job)
            try:
                return self.prepare(message)
            finally:
                heartbeat.rest(thread=job)

        return work
