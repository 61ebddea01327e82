"""Show the start of a server as one screen: phases with bars and seconds, then the server and how to talk to it.

On a terminal the phases move in place; elsewhere each is one plain line, so that logs stay readable. With
`--log-format json` see `JsonScreen`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import IO, TYPE_CHECKING

import msgspec

from tokenmill.cli.startup_report import (
    base_url,
    bytes_text,
    chat_command,
    curl_command,
    facts,
    model_name,
    open_to_all,
)
from tokenmill.config.configs import ServerConfig
from tokenmill.core.engine_messages import EngineProgress, EngineReady
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.server.process.screen import Screen

if TYPE_CHECKING:
    from rich.progress import TaskID

# Totals from here on are bytes: no phase has a million of anything else.
BYTES_FROM = 1 << 20
REFRESH_PER_SECOND = 8

Clock = Callable[[], float]


def open_screen(stream: IO[str], server: ServerConfig, clock: Clock = time.monotonic) -> AbstractContextManager[Screen]:
    """Open a screen that suits the stream, or the programs that read its lines; `clock` counts seconds."""
    if server.log_format == "json":
        return nullcontext(JsonScreen(stream, server))
    if stream.isatty():
        return TerminalScreen(stream, server, clock)
    return nullcontext(PlainScreen(stream, server, clock))


class PlainScreen:
    """A screen of plain lines: one when a phase begins, one when it ends, and the summary."""

    def __init__(self, stream: IO[str], server: ServerConfig, clock: Clock) -> None:
        self._stream = stream
        self._server = server
        self._clock = clock
        self._started = clock()
        self._phase = ""
        self._phase_started = self._started

    def on_progress(self, progress: EngineProgress) -> None:
        """Report a change of phase; progress within a phase is silent here."""
        if progress.phase != self._phase:
            self._end_phase()
            self._phase, self._phase_started = progress.phase, self._clock()
            self._say(f"{progress.phase} ...")

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        """Print the summary."""
        self._end_phase()
        for label, text in facts(ready, self._server, chat):
            self._say(f"{label:<13} {text}")
        self._say(f"ready in {self._clock() - self._started:.1f} s; Ctrl-C ends. Try:")
        self._say(curl_command(model_name(ready, self._server), self._server, ready.pooling is None))

    def on_error(self, sentence: str) -> None:
        """Print the error."""
        self._say(f"tokenmill: {sentence}")

    def on_line(self, line: str) -> None:
        """Print the line."""
        self._say(line)

    def _end_phase(self) -> None:
        if self._phase:
            self._say(f"{self._phase}: {self._clock() - self._phase_started:.1f} s")
            self._phase = ""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalScreen:
    """A screen with phases that move in place, with rich."""

    def __init__(self, stream: IO[str], server: ServerConfig, clock: Clock) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(file=stream, highlight=False)
        self._server = server
        self._clock = clock
        self._started = clock()
        self._phase: TaskID | None = None
        self._phase_name = ""
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]ok[/]"),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=28),
            TextColumn("{task.elapsed:>5.1f} s"),
            TextColumn("[dim]{task.fields[amount]}"),
            console=self._console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_time=clock,
        )

    def __enter__(self) -> TerminalScreen:
        self._progress.start()
        # Something moves at once, although it takes a child process a moment to say its first word.
        self.on_progress(EngineProgress("starting processes", 0, 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_progress(self, progress: EngineProgress) -> None:
        """Move the bar of this phase, beginning it if it is new."""
        if self._phase is None or progress.phase != self._phase_name:
            self._end_phase()
            self._phase_name = progress.phase
            self._phase = self._progress.add_task(progress.phase, total=None, amount="")
        self._progress.update(
            self._phase, completed=progress.done, total=progress.total or None, amount=_amount(progress)
        )

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        """End the bars and print the summary below them."""
        from rich.markup import escape
        from rich.table import Table

        self._end_phase()
        self._progress.stop()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column(overflow="fold")
        for label, text in facts(ready, self._server, chat):
            table.add_row(label, escape(text))
        self._console.print()
        self._console.print(table)
        talk = chat_command(self._server)
        self._console.print(
            f"\n[bold green]ready[/] in {self._clock() - self._started:.1f} s; Ctrl-C ends. "
            f"In another terminal run [bold]{escape(talk)}[/] or paste:\n"
        )
        # Not wrapped by us: a wrapped command cannot be pasted.
        command = curl_command(model_name(ready, self._server), self._server, ready.pooling is None)
        self._console.print(escape(command), soft_wrap=True)
        self._console.print()

    def on_error(self, sentence: str) -> None:
        """End the bars and print the error."""
        from rich.markup import escape

        self._progress.stop()
        self._console.print(f"[bold red]tokenmill:[/] {escape(sentence)}", soft_wrap=True)

    def on_line(self, line: str) -> None:
        """Print the line above the bars."""
        self._console.print(line, markup=False, soft_wrap=True)

    def _end_phase(self) -> None:
        if self._phase is not None:
            total = next(task.total for task in self._progress.tasks if task.id == self._phase) or 1
            self._progress.update(self._phase, completed=total, total=total)
            self._progress.stop_task(self._phase)
            self._phase = None


def _amount(progress: EngineProgress) -> str:
    if not progress.total:
        return ""
    if progress.total >= BYTES_FROM:
        return f"{bytes_text(progress.done)} of {bytes_text(progress.total)}"
    return f"{progress.done} of {progress.total}"


class JsonScreen:
    """A `serving.server.process.screen.Screen` that writes JSON objects; a plain line becomes one too."""

    def __init__(self, stream: IO[str], server: ServerConfig) -> None:
        self._write: Callable[[str], None] = lambda line: print(line, file=stream, flush=True)
        self._log = EventLog(self._write, as_json=True)
        self._server = server
        self._started = time.monotonic()
        self._phase = ""

    def on_progress(self, progress: EngineProgress) -> None:
        """Report a change of phase."""
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._log.note("start", progress.phase)

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        """Report the started server."""
        seconds = round(time.monotonic() - self._started, 3)
        engine, url = msgspec.structs.asdict(ready), base_url(self._server)
        self._log.note("ready", f"ready in {seconds:.1f} s", seconds=seconds, url=url, engine=engine, chat=dict(chat))
        if (warning := open_to_all(self._server)) is not None:
            self._log.note("warning", warning)

    def on_error(self, sentence: str) -> None:
        """Report an error."""
        self._log.note("error", sentence)

    def on_line(self, line: str) -> None:
        """Write a line; the server's own lines are objects already."""
        if line.startswith('{"time":'):
            self._write(line)
        elif line.strip():
            self._log.note("output", line)
