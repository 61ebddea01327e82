"""Show the start and the life of a server as JSON, an object a line, for programs that collect logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

import msgspec

from tokenmill.cli.startup_report import base_url, open_to_all
from tokenmill.config.configs import ServerConfig
from tokenmill.core.engine_messages import EngineProgress, EngineReady
from tokenmill.serving.observe.event_log import EventLog


class JsonScreen:
    """A `serving.server.process.screen.Screen` that writes JSON objects; a plain line becomes one too."""

    def __init__(self, stream: IO[str], server: ServerConfig) -> None:
        self._write: Callable[[str], None] = lambda line: print(line, file=stream, flush=True)
        self._log = EventLog(self._write, as_json=True)
        self._server = server
        self._started = time.monotonic()
        self._phase = ""

    def __enter__(self) -> JsonScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: it holds no resources."""

    def on_progress(self, progress: EngineProgress) -> None:
        """Report a change of phase."""
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._log.note("start", progress.phase)

    def on_ready(self, ready: EngineReady) -> None:
        """Report the started server."""
        seconds = round(time.monotonic() - self._started, 3)
        engine, url = msgspec.structs.asdict(ready), base_url(self._server)
        self._log.note("ready", f"ready in {seconds:.1f} s", seconds=seconds, url=url, engine=engine)
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
