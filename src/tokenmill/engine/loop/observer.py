"""`Observer`: watch each step of an engine without changing any, for step stats, the step log and the watchdog."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.whole_file import whole_file
from tokenmill.engine.loop.lifetimes import Lifetimes
from tokenmill.engine.loop.stats import StepStats
from tokenmill.engine.loop.step_log import Added, Extended, Iteration, News, RecordedInput, StepLog, StepRecord

logger = logging.getLogger(__name__)


class Observer:
    """Receives each part of a step as it ends: `begin_iteration` -> `scheduled` -> `ran` -> `committed`."""

    def __init__(self, log: StepLog | None = None, watchdog: Watchdog | None = None) -> None:
        self.stats = StepStats()
        self.lifetimes = Lifetimes()
        self._log = log or StepLog()
        self._watchdog = watchdog or Watchdog()
        self._plan: StepPlan | None = None
        self._result: StepResult | None = None
        self._error: str | None = None
        self._laps: list[float] = []
        self._busy_since: float | None = None
        self._rest = 0.0
        self._news = News()

    def record(self, arrived: RecordedInput) -> None:
        """Log an input from outside that the engine has taken in."""
        self._log.record(arrived)
        match arrived:
            case Added():
                self._news.arrived.append((arrived.message.id, len(arrived.message.prompt_token_ids)))
                self.lifetimes.expect(arrived.message.id, arrived.message.deadline)
                self.stats.prompt_tokens += len(arrived.message.prompt_token_ids)
            case Extended():
                self.stats.prompt_tokens += len(arrived.token_ids)

    def begin_iteration(self) -> None:
        """Begin an iteration of the loop."""
        self._laps = [time.perf_counter()]
        self._rest = 0.0 if self._busy_since is None else self._laps[0] - self._busy_since

    def scheduled(self, plan: StepPlan | None, preempted: list[str]) -> None:
        """Record a plan about to be launched (None: nothing can run), and the requests preempted for it."""
        self._news.preempted += preempted
        self._plan = plan
        if plan is not None and plan.request_ids:
            self.stats.observe_plan(plan)
        self._laps.append(time.perf_counter())

    def ran(self, result: StepResult | None, error: str | None) -> None:
        """Record how the step that was due, if any, has ended."""
        self._result, self._error = result, error
        self._laps.append(time.perf_counter())

    def committed(self, outputs: Sequence[TokenOutput], waiting: str, is_stuck: bool, goes_on: bool) -> None:
        """Record the outputs of the iteration and end it.

        Args:
            waiting: why the first of the waiting requests waits.
            is_stuck: nothing was launched or taken in, though requests could go on.
            goes_on: the next iteration comes at once.
        """
        started, scheduled, ran = self._laps
        ended = time.perf_counter()
        self._busy_since = ended if goes_on else None
        seconds = (scheduled - started, ran - scheduled, ended - ran)
        record = StepRecord(error=self._error, waiting=waiting, seconds=seconds, rest=self._rest)
        self.ended([output for output in outputs if output.finish_reason is not None])
        self._news.first = self.lifetimes.started(outputs)
        self._log.add(self._plan, self._result, record, self._take_news(started, ended))
        if is_stuck:
            self._watchdog.report(self._log)
        if self._plan is not None or self._result is not None or self._error is not None:
            self.stats.observe(seconds)
        self.stats.generation_tokens += sum(len(output.token_ids) for output in outputs)

    def ended(self, outputs: Sequence[TokenOutput]) -> None:
        """Record the last outputs of requests, or of a session's turn."""
        self.stats.stamp(outputs)
        self._news.ended += [(output.id, output.finish_reason or "") for output in outputs]

    def iterations(self) -> list[Iteration]:
        """Return the last thousand iterations, oldest first; news since the last of them makes one more."""
        if self._news:
            now = time.perf_counter()
            self._plan = None
            self._log.add_news(self._take_news(now, now))
        return self._log.iterations()

    def _take_news(self, started: float, ended: float) -> News:
        news, self._news = self._news, News()
        news.at = started
        if news or (self._plan is not None and self._plan.new_rows):
            self.lifetimes.add(self._plan, news, ended)
        return news

    def close(self) -> None:
        """Finish the log."""
        self._log.close()


class Watchdog:
    """Reports, once, that requests could go on and do not, and writes the last steps to a file for debugging."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._has_reported = False

    def report(self, log: StepLog) -> None:
        """Report a bug: requests are ready, pages and budget are there, nothing is launched, and no plan was made."""
        if self._has_reported:
            return
        self._has_reported = True
        logger.error("no request makes progress although some could")
        try:
            # A name that cannot be guessed: all users share the folder.
            path = (self._folder or Path(tempfile.gettempdir())) / f"tokenmill-stuck-{secrets.token_hex(8)}.jsonl"
            with whole_file(path, 0o600) as file:
                for record in log.recent():
                    file.write(msgspec.json.encode(record) + b"\n")
            logger.error("the last steps were written to %s", path)
        except OSError as error:
            logger.error("the last steps could not be written: %s", error.strerror)
