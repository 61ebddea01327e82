"""The requests that may have killed an engine: those of its launched steps, known from a page of memory.

The page is a small file that the engine maps and its parent reads, so it outlives an engine that is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.core.request import Request

PAGE_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


def page_path(folder: Path, inbox: str) -> Path:
    """Return the path of an engine's page, by the name of the engine's inbox."""
    return folder / f"{inbox}.running"


class LaunchedStep(Protocol):
    """The part of a step in flight that is needed here."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests of the step."""


class Executor(Protocol):
    """The part of the executor protocol (`engine/runner/executor.py`) that is needed here."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Start a step."""

    def recover(self) -> None:
        """Run steps again after a failure."""

    def close(self) -> None:
        """Let go of what steps ran with."""


class RunningPage:
    """The engine's end of the page."""

    def __init__(self, path: Path) -> None:
        """Make the page. On a full disk it is private memory, and no request is ever suspected."""
        try:
            with path.open("wb+") as file:
                # Not a hole: writing to one that the disk has no block for ends the process.
                os.posix_fallocate(file.fileno(), 0, PAGE_BYTES)
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            self._page = mmap.mmap(-1, PAGE_BYTES)

    def write(self, ids: Iterable[str]) -> None:
        """Record the requests that run from now on. Those that do not fit are left out."""
        text = " ".join(ids).encode()[: PAGE_BYTES - _LENGTH.size]
        # Its length last: who reads a page that is being written finds it empty.
        self._page[: _LENGTH.size] = _LENGTH.pack(0)
        self._page[_LENGTH.size : _LENGTH.size + len(text)] = text
        self._page[: _LENGTH.size] = _LENGTH.pack(len(text))


def running_at_death(path: Path) -> list[str]:
    """Return the ids on a page; an empty list where there is no page."""
    try:
        page = path.read_bytes()
    except OSError:
        return []
    (length,) = _LENGTH.unpack_from(page)
    return page[_LENGTH.size : _LENGTH.size + length].decode().split()


class MarkingExecutor:
    """Writes the requests of the launched steps to the page before each launch; another executor runs the steps."""

    def __init__(self, executor: Executor, in_flight: Iterable[LaunchedStep], page: RunningPage) -> None:
        """`in_flight`: the queue of launched steps, the last of which is being launched."""
        self._executor = executor
        self._in_flight = in_flight
        self._page = page

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Record the requests of all launched steps, then launch the plan."""
        self._page.write(dict.fromkeys(request.id for step in self._in_flight for request in step.requests))
        return self._executor.launch(plan)

    def recover(self) -> None:
        """Run steps again after a failure."""
        self._executor.recover()

    def close(self) -> None:
        """Close the other executor."""
        self._executor.close()


class CrashAttribution:
    """Tells the request that kills engines from those that ran beside it. Suspects are tried again, each alone."""

    def __init__(self) -> None:
        self._suspects: set[str] = set()
        self._engine = ""

    @property
    def suspects(self) -> set[str]:
        """Ids of the requests under suspicion."""
        return set(self._suspects)

    @property
    def under_trial(self) -> list[str]:
        """Name, as sentences use it, of the engine whose suspects are tried; empty if there are none."""
        return [self._engine] if self._suspects else []

    def clear(self, ids: Iterable[str] | None = None) -> None:
        """Clear requests that have run alone without harm, or have ended; None: all."""
        self._suspects.difference_update(list(self._suspects) if ids is None else ids)

    def died(self, ids: Iterable[str], engine: str) -> tuple[list[str], list[str]]:
        """Suspect or convict the requests that ran when an engine died. Their owner clears those that have ended since.

        Returns:
            The requests to try alone, and the one convicted, if any: the only one that ran at two deaths.
        """
        self._engine = engine
        running = list(ids)
        twice = [request_id for request_id in running if request_id in self._suspects]
        convicted = twice if len(twice) == 1 else []
        suspects = [request_id for request_id in running if request_id not in convicted]
        self._suspects = self._suspects.difference(convicted).union(suspects)
        return suspects, convicted
