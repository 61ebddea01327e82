"""What a server tells whoever started it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from tokenmill.ipc.standard_streams import LossyStream

if TYPE_CHECKING:  # the keeper, which imports this, stays small
    from tokenmill.core.engine_messages import EngineProgress, EngineReady


class Screen(Protocol):
    """Told of a server's start and life."""

    def on_progress(self, progress: EngineProgress) -> None:
        """A phase of the start began or moved on; the phase before it is over."""

    def on_ready(self, ready: EngineReady) -> None:
        """The server accepts requests."""

    def on_error(self, sentence: str) -> None:
        """Why the server ends with another exit code than 0, or cannot start."""

    def on_line(self, line: str) -> None:
        """A line for the log, or of what a child process wrote to its standard error."""


OpenScreen = Callable[[], AbstractContextManager[Screen]]


class StandardError:
    """Writes what goes wrong, and what children write, to standard error; what cannot be written is lost."""

    def __init__(self) -> None:
        self._stream = sys.stderr if isinstance(sys.stderr, LossyStream) else LossyStream(sys.stderr)

    def __enter__(self) -> StandardError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to let go."""

    def on_progress(self, progress: EngineProgress) -> None:
        """See `Screen`."""

    def on_ready(self, ready: EngineReady) -> None:
        """See `Screen`."""

    def on_error(self, sentence: str) -> None:
        """See `Screen`."""
        print(sentence, file=self._stream, flush=True)

    def on_line(self, line: str) -> None:
        """See `Screen`."""
        print(line, file=self._stream, flush=True)
