"""Define the reports of a model's server to the process that has started it: lines of JSON on a pipe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType

import msgspec

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.engine_messages import EngineProgress, EngineReady
from tokenmill.serving.server.process.screen import StandardError


class Launch(msgspec.Struct, frozen=True):
    """The configs of a model's server, which it reads from its standard input."""

    engine: EngineConfig
    server: ServerConfig


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Report a phase of the start; `total` 0: nobody knows how much there is to do."""

    phase: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Report that the model takes requests.

    Attributes:
        context: tokens of the longest request. num_bytes: of its weights and KV.
    """

    context: int
    num_bytes: int


class Complaint(msgspec.Struct, frozen=True, tag=True):
    """Report why the server cannot start, or ends."""

    sentence: str


Report = Loading | Loaded | Complaint


class ReportingScreen(StandardError):
    """A screen that reports to another process; lines of the log go to standard error."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def __enter__(self) -> ReportingScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def on_progress(self, progress: EngineProgress) -> None:
        """Report the phase."""
        self._report(Loading(progress.phase, progress.done, progress.total))

    def on_ready(self, ready: EngineReady, chat: Sequence[tuple[str, str]] = ()) -> None:
        """Report that requests are taken."""
        self._report(Loaded(ready.max_model_len, ready.weight_bytes + ready.kv_bytes))

    def on_error(self, sentence: str) -> None:
        """Report why it ends, and write it."""
        self._report(Complaint(sentence))
        super().on_error(sentence)

    def _report(self, report: Report) -> None:
        # Where nobody reads it any more, this process ends soon, too.
        with contextlib.suppress(OSError):
            os.write(self._descriptor, msgspec.json.encode(report) + b"\n")
