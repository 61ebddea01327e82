"""Show how far a call of `LLM` is: bars of rich on a terminal, one plain line in a notebook without widgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, Self

SECONDS_BETWEEN_LINES = 0.25


class Progress(Protocol):
    """Shows how many of a call's prompts are finished, while it is entered."""

    def update(self, num_finished: int, num_new_tokens: int) -> None:
        """Show the progress after a step."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_progress(total: int, shown: bool) -> AbstractContextManager[Progress]:
    """Return the progress of a call with `total` prompts; rich is imported when it is made, shown or not."""
    from rich.console import Console

    console = Console(stderr=True)
    # rich draws in notebooks with ipywidgets, and warns at each refresh where they are not installed.
    if shown and console.is_jupyter and find_spec("ipywidgets") is None:
        return LineProgress(total)
    return BarProgress(total, shown, console.is_jupyter)


class BarProgress:
    """A bar with rates and the time left."""

    def __init__(self, total: int, shown: bool, in_notebook: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._num_tokens = 0
        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_jupyter=in_notebook and shown),
            disable=not shown,
        )
        self._task = self._progress.add_task("generating", total=total, tokens=0, rate=0.0)

    def update(self, num_finished: int, num_new_tokens: int) -> None:
        """Show the progress after a step."""
        self._num_tokens += num_new_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed if elapsed else 0.0
        self._progress.update(self._task, completed=num_finished, tokens=self._num_tokens, rate=rate)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class LineProgress:
    """One line of text that is written again in its place, four times a second at most."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._started = self._written = clock()
        self._num_finished = self._num_tokens = 0

    def update(self, num_finished: int, num_new_tokens: int) -> None:
        """Show the progress after a step."""
        self._num_finished = num_finished
        self._num_tokens += num_new_tokens
        if self._clock() - self._written >= SECONDS_BETWEEN_LINES:
            self._write("")

    def __enter__(self) -> Self:
        self._write("")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\n")

    def _write(self, end: str) -> None:
        self._written = self._clock()
        seconds = self._written - self._started
        rate = self._num_tokens / seconds if seconds else 0.0
        line = f"generating {self._num_finished}/{self._total}, {self._num_tokens} tokens, {rate:.1f}/s"
        print(f"\r{line:<60}", end=end, file=sys.stderr, flush=True)
