"""The start of a server as one screen: phases with bars and seconds, then what was started and how to talk to it.

On a terminal the phases move in place; elsewhere each is one plain line, so that logs stay readable.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, Protocol

from tokenmill.cli.facts import base_url, bytes_text, curl_command, facts
from tokenmill.config import ServerConfig
from tokenmill.messages import EngineProgress, EngineReady

if TYPE_CHECKING:
    from rich.progress import TaskID

# Totals from here on are bytes: no phase has a million of anything else.
BYTES_FROM = 1 << 20
REFRESH_PER_SECOND = 8


class Screen(Protocol):
    """What `tokenmill.server.launch` tells while a server starts."""

    def on_progress(self, progress: EngineProgress) -> None:
        """A phase began or moved on; the phase before it is over."""

    def on_ready(self, ready: EngineReady) -> None:
        """The server accepts requests."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_screen(stream: IO[str], server: ServerConfig) -> Screen:
    """A screen that suits the stream."""
    return TerminalScreen(stream, server) if stream.isatty() else PlainScreen(stream, server)


class PlainScreen:
    """One line when a phase begins, one when it ends, and the summary."""

    def __init__(self, stream: IO[str], server: ServerConfig) -> None:
        self._stream = stream
        self._server = server
        self._started = time.monotonic()
        self._phase = ""
        self._phase_started = self._started

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = ""

    def on_progress(self, progress: EngineProgress) -> None:
        """Report a change of phase; progress within a phase is silent here."""
        if progress.phase != self._phase:
            self._end_phase()
            self._phase, self._phase_started = progress.phase, time.monotonic()
            self._say(f"{progress.phase} ...")

    def on_ready(self, ready: EngineReady) -> None:
        """Print the summary."""
        self._end_phase()
        url = base_url(self._server)
        for label, text in facts(ready, url):
            self._say(f"{label:<13} {text}")
        name = self._server.served_model_name or ready.model
        self._say(f"ready in {time.monotonic() - self._started:.1f} s; Ctrl-C ends. Try:")
        self._say(curl_command(name, url, self._server))

    def _end_phase(self) -> None:
        if self._phase:
            self._say(f"{self._phase}: {time.monotonic() - self._phase_started:.1f} s")
            self._phase = ""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalScreen:
    """Phases that move in place, with rich."""

    def __init__(self, stream: IO[str], server: ServerConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(file=stream, highlight=False)
        self._server = server
        self._started = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]ok[/]"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=28),
            TextColumn("{task.elapsed:>5.1f} s"),
            TextColumn("[dim]{task.fields[amount]}"),
            console=self._console,
            refresh_per_second=REFRESH_PER_SECOND,
        )

    def __enter__(self) -> TerminalScreen:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_progress(self, progress: EngineProgress) -> None:
        """Move the bar of this phase, beginning it if it is new."""
        if progress.phase not in self._tasks:
            self._end_phases()
            self._tasks[progress.phase] = self._progress.add_task(progress.phase, total=None, amount="")
        self._progress.update(
            self._tasks[progress.phase],
            completed=progress.done,
            total=progress.total or None,
            amount=_amount(progress),
        )

    def on_ready(self, ready: EngineReady) -> None:
        """End the bars and print the summary below them."""
        from rich.markup import escape
        from rich.table import Table

        self._end_phases()
        self._progress.stop()
        url = base_url(self._server)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column(overflow="fold")
        for label, text in facts(ready, url):
            table.add_row(label, escape(text))
        name = self._server.served_model_name or ready.model
        print_line = self._console.print
        print_line()
        print_line(table)
        print_line(
            f"\n[bold green]ready[/] in {time.monotonic() - self._started:.1f} s  [dim]Ctrl-C ends. "
            "Paste this into another terminal, or run[/] tokenmill chat[dim]:[/]\n"
        )
        # Not wrapped by us: a wrapped command cannot be pasted.
        print_line(escape(curl_command(name, url, self._server)), soft_wrap=True)
        print_line()

    def _end_phases(self) -> None:
        for task in self._tasks.values():
            total = self._progress.tasks[self._progress.task_ids.index(task)].total or 1
            self._progress.update(task, completed=total, total=total)
            self._progress.stop_task(task)


def _amount(progress: EngineProgress) -> str:
    if not progress.total:
        return ""
    if progress.total >= BYTES_FROM:
        return f"{bytes_text(progress.done)} of {bytes_text(progress.total)}"
    return f"{progress.done} of {progress.total}"
