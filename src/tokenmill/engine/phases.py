"""Start-up in phases: each is reported while it goes on, and its seconds are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


class Phases:
    """Seconds of each start-up phase, and the way to tell how far one is."""

    def __init__(self, report: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a phase; yields the function that reports `done, total` within it."""
        start = time.perf_counter()
        self._report(name, 0, 0)
        yield lambda done, total: self._report(name, done, total)
        self.seconds[name] = time.perf_counter() - start
