"""Define the screen on which a server shows its start and its life."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from tokenmill.ipc.standard_streams import LossyStream

if TYPE_CHECKING:  # the parent, which imports this, stays small
    from tokenmill.core.engine_messages import EngineProgress, EngineReady


class Screen(Protocol):
    """Shows a server's start and life."""

    def on_progress(self, progress: EngineProgress) -> None:
        """Show that a phase of the start began or moved on; the phase before it is over."""

    def on_ready(self, ready: EngineReady) -> None:
        """Show that the server accepts requests."""

    def on_error(self, sentence: str) -> None:
        """Show why the server cannot start, or ends with another exit code than 0."""

    def on_line(self, line: str) -> None:
        """Show a line for the log, or one that a child process wrote to its standard error."""


OpenScreen = Callable[[], AbstractContextManager[Screen]]


class StandardError:
    """A `Screen` that writes errors and lines to standard error; lines that cannot be written are lost."""

    def __init__(self) -> None:
        self._stream = sys.stderr if isinstance(sys.stderr, LossyStream) else LossyStream(sys.stderr)

    def __enter__(self) -> StandardError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def on_progress(self, progress: EngineProgress) -> None:
        """Show nothing."""

    def on_ready(self, ready: EngineReady) -> None:
        """Show nothing."""

    def on_error(self, sentence: str) -> None:
        """Write the sentence to standard error."""
        print(sentence, file=self._stream, flush=True)

    def on_line(self, line: str) -> None:
        """Write the line to standard error."""
        print(line, file=self._stream, flush=True)
