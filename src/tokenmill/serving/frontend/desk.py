"""Where one thread of a text worker prepares messages. Who watches the process can see there what it is at."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.serving.frontend.attempt import Attempt
from tokenmill.serving.frontend.prompt_processor import Prepared, Question, ids_of
from tokenmill.serving.replicas.work_page import WorkPage

Prepare = Callable[[Question, Attempt], Prepared]


class Desk:
    """One line of the `WorkPage`, and one job of the heartbeat where the thread is not the loop's."""

    def __init__(self, prepare: Prepare, page: WorkPage, line: int, seconds: float) -> None:
        """
        Args:
            prepare: see `PromptProcessor.prepare`.
            line: of the page; no two desks have the same.
            seconds: see `Attempt`.
        """
        self._prepare = prepare
        self._page = page
        self._line = line
        self._seconds = seconds

    def prepare(self, message: Question, is_hurried: bool = False) -> Prepared:
        """What a message comes to.

        Raises:
            TakesLong: it is not done in a hurry.
        """
        first = ids_of(message)[0]
        attempt = Attempt(self._seconds, is_hurried, lambda did: self._page.write(self._line, did, first))
        attempt.note("prepared")
        try:
            return self._prepare(message, attempt)
        finally:
            self._page.clear(self._line)

    def watched(self, heartbeat: Heartbeat, job: str, patience: float) -> Callable[[Question], Prepared]:
        """`prepare` for a thread of its own, which the heartbeat tells of."""

        def work(message: Question) -> Prepared:
            heartbeat.begin(job, patience, thread=job)
            try:
                return self.prepare(message)
            finally:
                heartbeat.rest(thread=job)

        return work
