"""Run an API process beside the first (`--api-server-count`): it takes connections from the same listening socket.

It answers generating calls through text workers of its own and leaves other routes to the first process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.core.api_messages import (
    AbortCalls,
    AnswerCalls,
    FindCalls,
    FinishedRequest,
    FoundCalls,
    FromSibling,
    Observed,
    SiblingEnded,
)
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.histogram import Histogram
from tokenmill.core.messages import FromWorker, RequestRejected, TextOutputs
from tokenmill.core.text_queries import Decoded, Encoded, ParsersFound
from tokenmill.ipc.channels import http_path
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.standard_streams import num_lost_lines
from tokenmill.serving.frontend.admission_control import AdmissionLimits
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.observe.metrics import SECONDS, Metrics
from tokenmill.serving.replicas.api_workers.reported_parts import ReportedParts
from tokenmill.serving.replicas.part import Owner
from tokenmill.serving.server.api_worker.forwarder import Forwarder
from tokenmill.serving.server.process.api_process import ApiProcess, Ending, run_process
from tokenmill.serving.server.process.screen import Screen, StandardError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

REPORT_SECONDS = 1.0


def serve(folder: Path, launch: LaunchFile, listener: socket.socket, index: int) -> int:
    """Serve until the first API process or a signal ends it; return the exit code. See `first_process.serve`."""
    screen = StandardError()
    return run_process(lambda: ApiWorkerProcess(folder, launch, listener, screen, index), screen)


class ApiWorkerProcess(ApiProcess):
    """An `ApiProcess` that reports what its clients experience to the first one."""

    _parts: ReportedParts

    def __init__(self, folder: Path, launch: LaunchFile, listener: socket.socket, screen: Screen, index: int) -> None:
        """Make the API worker with `index` among the API processes."""
        super().__init__(launch, listener, screen)
        self._folder = folder
        self._index = index
        owner = Owner(
            ended=lambda exit_code, _: self._end(Ending(exit_code, "the server is stopping")),
            died=lambda part, text: None,
            replaced=lambda *worker: self._client.replace(*worker),  # noqa: PLW0108 - the client comes later
            hung=lambda part, text: None,
            answered=self._answered,
            told=lambda _: self._client.note_queued(self._parts.engines.stats.num_queued),
            ticked=self._spare,
            progress=lambda _: None,
            line=screen.on_line,
        )
        self._parts = ReportedParts(folder, launch, index, owner)
        self._observations = Observations(index)
        self._metrics = Metrics(self._parts.engines, self._parts.counts)  # the first one's are shown
        limits, first = AdmissionLimits.from_config(launch.server), launch.topology.workers_of(index).start
        self._client = EngineClient(self._parts.workers, self._observations, limits, launch.engine.seed, first)

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        return [self._report()]

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        await super()._serve(Forwarder(app, self._server.root_path, http_path(self._folder)), listener)

    def _begun(self, ready: EngineReady) -> None:
        """Do nothing: the first process announces the start."""

    async def _report(self) -> None:
        while True:
            self._parts.send(self._observations.take_message(self._client.num_open))
            await asyncio.sleep(REPORT_SECONDS)

    def _answered(self, message: FromWorker | FromSibling | FindCalls | AbortCalls | AnswerCalls) -> None:
        match message:
            case FindCalls():
                found = self._client.find(message.names, message.owner)
                calls = [(name, ids) for name, own in found.items() for ids in own]
                calls = calls if message.names else [("", self._client.open_ids)]
                notes = self._client.notes(one for _, ids in calls for one in ids) if message.names else {}
                self._parts.send(FoundCalls(message.id, calls, notes))
            case AbortCalls():
                self._client.abort(message.ids)
            case AnswerCalls():
                self._client.answer_now(message.ids)
            case TextOutputs() | RequestRejected() | Encoded() | Decoded() | ParsersFound():
                self._client.dispatch(message)

    async def _let_go(self) -> None:
        self._parts.send(self._observations.take_message(0))
        self._parts.send(SiblingEnded(self._index))
        await super()._let_go()


class Observations:
    """A `RequestObserver` that gathers observations until they are taken; `index`: of the API process."""

    def __init__(self, index: int) -> None:
        self._gathered = Observed(index=index)

    def first_token(self, seconds: float) -> None:
        """Keep the time from a request to its first token."""
        self._gathered.first_tokens.append(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Keep the time per token of further tokens."""
        if self._gathered.between_tokens is None:
            self._gathered.between_tokens = Histogram.with_bounds(SECONDS)
        self._gathered.between_tokens.add(seconds / num_tokens)

    def finished(self, request: FinishedRequest) -> None:
        """Keep a finished request."""
        self._gathered.finished.append(request)

    def take_message(self, num_open: int) -> Observed:
        """Return the observations since the last call as a message; `num_open`: requests that the process has now."""
        gathered, self._gathered = self._gathered, Observed(index=self._gathered.index)
        gathered.num_open, gathered.num_lost_lines = num_open, num_lost_lines()
        return gathered
