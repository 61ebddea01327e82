"""Jobs: every check and every model in a process of its own, with its own deadline; what they find as it comes.

A fault on a device is final for the process that meets it, and a hang ends with its job. Results are lines of JSON on
a job's standard output, so that what a killed job had found before is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
DETAIL_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Job:
    """A call of `tools/gpu/one.py`.

    Attributes:
        part: under which its rows are reported.
        arguments: of one.py; the first is what is run.
        seconds: after which it is killed.
    """

    part: str
    arguments: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        """Return its name in a report where it brought no row of its own."""
        return " ".join(self.arguments)


def run_jobs(jobs: Sequence[Job], width: int, until: float, record: Callable[[Row], None]) -> None:
    """Run jobs, `width` at a time.

    Args:
        until: by `time.monotonic`; no job begins after it, and none goes on.
        record: called with each row as it comes, one at a time.
    """
    lock = threading.Lock()

    def tell(row: Row) -> None:
        with lock:
            record(row)

    def run(job: Job) -> None:
        left = min(job.seconds, until - time.monotonic())
        if left <= 0:
            tell({"part": job.part, "check": job.name, "passed": None, "detail": "no time was left"})
        else:
            _run(job, left, tell)

    with ThreadPoolExecutor(width) as threads:
        list(threads.map(run, jobs))


def _run(job: Job, seconds: float, tell: Callable[[Row], None]) -> None:
    command = [sys.executable, "-m", "tools.gpu.one", *job.arguments]
    # What is installed beside the sources (`pip install --target`) is on the inherited path.
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            # With what it has started itself.
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, expire)
        timer.start()
        assert process.stdout is not None, "its output was asked for"
        try:
            rows = _tell_rows(process.stdout, job.part, tell)
            code = process.wait()
        finally:
            timer.cancel()
        told_why = any(row.get("passed") is False for row in rows)
        if not rows or (code and not told_why):
            why = f"killed after {seconds:.0f} s" if expired.is_set() else f"ended with {code}"
            detail = f"{_tail(errors)}\n{why}".strip()
            tell({"part": job.part, "check": job.name, "passed": False, "detail": detail})


def _tell_rows(output: IO[str], part: str, tell: Callable[[Row], None]) -> list[Row]:
    """Lines of JSON are rows; others are what some library had to say."""
    rows = []
    for line in output:
        if line.startswith("{"):
            rows.append({"part": part, **json.loads(line)})
            tell(rows[-1])
    return rows


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-DETAIL_CHARACTERS:].strip()
