"""Which requests may have killed an engine: those of the steps that it had launched, known from a page of memory.

The page is a small file that the engine maps and its parent reads, so it says what it said when the engine was killed.
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
    """Where the page of an engine lies, by the name of its inbox."""
    return folder / f"{inbox}.running"


class LaunchedStep(Protocol):
    """What is needed of a step in flight."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that are in it."""


class Executor(Protocol):
    """What runs steps; see `engine/runner/executor.py`."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Start a step."""

    def recover(self) -> None:
        """After a failure, run steps again."""

    def close(self) -> None:
        """Let go."""


class RunningPage:
    """The engine's end of the page."""

    def __init__(self, path: Path) -> None:
        """Make it. On a full disk it is memory that nobody else sees: nobody is suspected then."""
        try:
            with path.open("wb+") as file:
                # Not a hole: writing to one that the disk has no block for ends the process.
                os.posix_fallocate(file.fileno(), 0, PAGE_BYTES)
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            self._page = mmap.mmap(-1, PAGE_BYTES)

    def write(self, ids: Iterable[str]) -> None:
        """These run from now on. Of more than fit, the rest is left out."""
        text = " ".join(ids).encode()[: PAGE_BYTES - _LENGTH.size]
        # Its length last: who reads a page that is being written finds it empty.
        self._page[: _LENGTH.size] = _LENGTH.pack(0)
        self._page[_LENGTH.size : _LENGTH.size + len(text)] = text
        self._page[: _LENGTH.size] = _LENGTH.pack(len(text))


def running_at_death(path: Path) -> list[str]:
    """The ids on a page; none where there is no page."""
    try:
        page = path.read_bytes()
    except OSError:
        return []
    (length,) = _LENGTH.unpack_from(page)
    return page[_LENGTH.size : _LENGTH.size + length].decode().split()


class MarkingExecutor:
    """Writes the requests of the launched steps to the page before each launch, and leaves the rest to another."""

    def __init__(self, executor: Executor, in_flight: Iterable[LaunchedStep], page: RunningPage) -> None:
        """`in_flight`: the queue of launched steps; the one that is being launched is its last."""
        self._executor = executor
        self._in_flight = in_flight
        self._page = page

    def launch(self, plan: StepPlan) -> StepOutcome:
        """See `Executor`."""
        self._page.write(dict.fromkeys(request.id for step in self._in_flight for request in step.requests))
        return self._executor.launch(plan)

    def recover(self) -> None:
        """See `Executor`."""
        self._executor.recover()

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()


class Suspicion:
    """Tells the request that kills engines from those that were beside it. Suspects are tried again, each alone."""

    def __init__(self) -> None:
        self._suspects: set[str] = set()
        self._engine = ""

    @property
    def suspects(self) -> set[str]:
        """Those who are under suspicion now."""
        return set(self._suspects)

    @property
    def under_trial(self) -> list[str]:
        """What sentences call the engine whose suspects are tried; empty: nobody is under suspicion."""
        return [self._engine] if self._suspects else []

    def clear(self, ids: Iterable[str] | None = None) -> None:
        """These have run alone without harm, or have ended; None: all."""
        self._suspects.difference_update(list(self._suspects) if ids is None else ids)

    def died(self, ids: Iterable[str], engine: str) -> tuple[list[str], list[str]]:
        """An engine has died while these ran. Some may have ended since; whoever had them clears them.

        Returns:
            Who is to be tried alone, and who is convicted: the only one that was there at two deaths.
        """
        self._engine = engine
        running = list(ids)
        twice = [request_id for request_id in running if request_id in self._suspects]
        convicted = twice if len(twice) == 1 else []
        suspects = [request_id for request_id in running if request_id not in convicted]
        self._suspects = self._suspects.difference(convicted).union(suspects)
        return suspects, convicted
