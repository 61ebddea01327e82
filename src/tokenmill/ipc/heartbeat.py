"""Signs of life of a process: a thread beside its loop says every second since when the loop's job has been running.

A thread of its own, so that a long step still beats. A missing beat means that the process is stopped, or that
something in it holds the interpreter's lock. A loop that has had nothing to do for a while rests: the thread says so
and then only looks now and then, so that an idle server lets its machine sleep; a resting loop is known to live by its
answers to pings. Does not know what the jobs are, nor what becomes of the beats.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tokenmill.core.part_messages import Beat
from tokenmill.ipc.channels import API, Inbox, Outbox
from tokenmill.ipc.standard_streams import num_lost_lines

BEAT_SECONDS = 1.0
# After so many beats without a job a loop rests; then the thread looks for one so often, in seconds.
IDLE_BEATS = 10
REST_SECONDS = 5.0
LOOP = "loop"


class _Job(msgspec.Struct, frozen=True):
    name: str
    since: float
    limit: float

    def overtime(self, now: float) -> float:
        """Return the seconds beyond its limit; below 0 while it is within it."""
        return now - self.since - self.limit


class Heartbeat:
    """Sends beats from `__enter__` to `__exit__`. `begin_job` and `rest` are cheap; any thread may call them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        inbox: Inbox[Any],
        timeout: float,
        interval: float = BEAT_SECONDS,
    ) -> None:
        """Prepare the thread, which starts with `__enter__`.

        Args:
            folder: private folder with the API process's inbox, where beats go.
            inbox: the loop's own inbox, whose name the beats carry.
            timeout: seconds that a job should take at most.
            interval: seconds between beats.
        """
        self._context = context
        self._folder = folder
        self._inbox = inbox
        self._timeout = timeout
        self._interval = interval
        self._jobs: dict[str, _Job] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def begin_job(self, job: str, patience: float = 1.0, thread: str = LOOP) -> None:
        """Note that a thread begins a job, which ends the one before.

        Args:
            job: words that follow "busy with".
            patience: how many times the timeout it may take.
        """
        self._jobs[thread] = _Job(job, time.monotonic(), self._timeout * patience)

    def rest(self, thread: str = LOOP) -> None:
        """Note that a thread waits for work."""
        self._jobs.pop(thread, None)

    def beat(self) -> Beat:
        """Return the next beat: of the jobs that run, it reports the one that is most overdue."""
        now = time.monotonic()
        beat = Beat(part=self._inbox.name, num_dropped=self._inbox.num_dropped, num_lost_lines=num_lost_lines())
        if jobs := list(self._jobs.values()):
            job = max(jobs, key=lambda job: job.overtime(now))
            beat.job, beat.seconds, beat.limit = job.name, now - job.since, job.limit
        return beat

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread, and return when it has closed its socket, so that the context can be closed."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        # A socket is its thread's own.
        outbox = Outbox(self._context, self._folder, API)
        num_idle = 0
        try:
            while not self._ending.is_set():
                beat = self.beat()
                num_idle = 0 if beat.job else num_idle + 1
                beat.rests = num_idle >= IDLE_BEATS
                if num_idle <= IDLE_BEATS:
                    outbox.send(beat)
                self._ending.wait(REST_SECONDS if beat.rests else self._interval)
        finally:
            outbox.close()
