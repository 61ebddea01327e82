"""Manage the other API processes of a server from the first: report the parts to them, watch them, and query requests.

    API worker                      first
      SiblingStarted ─────────────>   when all parts are ready:
      <─ EngineReady of each engine, how they are, ServeNow
      Observed, every second ─────>   an API worker that says nothing for too long is killed; the parent starts it again
      <─ EngineReady, EngineStats, news, WorkerBack, WorkerTrouble, ServerState

A restarted API worker gets text workers without requests: those of the dead API worker are ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from tokenmill.core.api_messages import (
    AbortCalls,
    AnswerCalls,
    FindCalls,
    FinishedRequest,
    FoundCalls,
    FromSibling,
    Observed,
    PrefixNote,
    ServeNow,
    ServerEnds,
    ServerState,
    SiblingEnded,
    SiblingStarted,
    WorkerBack,
    WorkerTrouble,
)
from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.histogram import Histogram
from tokenmill.core.part_messages import Beat, EngineNews, Verdict
from tokenmill.ipc.channels import LINGER_MILLISECONDS, Outbox, api_name
from tokenmill.serving.replicas.health import PartHealth, trouble_of
from tokenmill.serving.replicas.supervisor import Supervisor

# An API worker answers between two other messages.
ANSWER_SECONDS = 5.0


class ClientObserver(Protocol):
    """Observes the latencies of API workers' clients; see `RequestObserver`."""

    def first_token(self, seconds: float) -> None:
        """Record that a first token came this long after its request."""

    def between_tokens(self, seconds: Histogram) -> None:
        """Record a histogram of the seconds between tokens."""

    def finished(self, request: FinishedRequest) -> None:
        """Record a request that has ended."""


class _ApiWorker:
    """One API worker. `busy`: its text workers that are being restarted; `told`: its workers' states as last sent."""

    def __init__(self, outbox: Outbox, name: str, timeout: float) -> None:
        self.outbox = outbox
        self.health = PartHealth(name, timeout)
        self.pid = 0
        self.serves = False
        self.num_open = 0
        self.busy: set[int] = set()
        self.told: dict[int, WorkerTrouble] = {}
        self.ended = asyncio.Event()


class ApiWorkers:
    """Talks to all API workers."""

    def __init__(self, folder: Path, parts: Supervisor, timeout: float, observer: ClientObserver) -> None:
        """`timeout`: seconds within which each API worker must be heard."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._parts = parts
        self._observer = observer
        self._all = {
            index: _ApiWorker(Outbox(self._context, folder, api_name(index)), f"API process {index}", timeout)
            for index in parts.topology.api_workers
        }
        self._open: dict[str, asyncio.Future[FoundCalls]] = {}
        self._is_started = False

    @property
    def trouble(self) -> str | None:
        """Sentences about API workers in trouble, or None."""
        return trouble_of(one.health for one in self._all.values())

    @property
    def num_open(self) -> int:
        """Number of the API workers' open requests, as last reported."""
        return sum(one.num_open for one in self._all.values())

    # --- what they are told -----------------------------------------------------------------------------------------

    def started(self) -> None:
        """Let all API workers serve, since all parts are ready."""
        self._is_started = True
        for index in self._all:
            self._let_serve(index)

    def told(self, message: EngineReady | EngineStats | EngineNews) -> None:
        """Pass on a message of an engine, or news of one."""
        for one in self._all.values():
            if one.serves:
                one.outbox.send(message)
        if isinstance(message, EngineReady):  # an API worker that came while no engine was ready waits for this
            for index in self._all:
                self._let_serve(index)

    def worker_back(self, worker: int, retired: str, news: Sequence[EngineNews], verdict: Verdict) -> None:
        """Tell an API worker that one of its text workers has been started again."""
        index = self._parts.topology.api_of(worker)
        one = self._all[index]
        one.busy.discard(worker)
        if one.serves:
            one.outbox.send(WorkerBack(worker, self._parts.inbox_of_worker(worker), retired, list(news), verdict))
        self._let_serve(index)

    def worker_ticked(self, worker: int, is_deaf: bool, is_lost: bool) -> None:
        """Tell an API worker the state of one of its text workers, if it has changed."""
        one = self._all[self._parts.topology.api_of(worker)]
        trouble = WorkerTrouble(worker, is_deaf, is_lost)
        if one.serves and one.told.get(worker) != trouble:
            one.told[worker] = trouble
            one.outbox.send(trouble)

    def pass_time(self, seconds: float, is_recovering: bool) -> None:
        """Send API workers the server's state, count `seconds` of silence, and kill those silent for too long."""
        for one in self._all.values():
            one.outbox.send(ServerState(is_recovering))
            one.health.pass_time(seconds)
            if one.serves and one.health.is_overdue:
                one.serves = False  # until its successor has begun: the number may be another process's soon
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def announce_end(self, exit_code: int, error: str) -> None:
        """Tell all API workers that the server ends."""
        for one in self._all.values():
            one.outbox.send(ServerEnds(exit_code, error))

    # --- what they say ----------------------------------------------------------------------------------------------

    def handle_message(self, message: FromSibling) -> None:
        """Take in a message of an API worker."""
        match message:
            case SiblingStarted():
                self._begin(message)
            case Observed():
                self._observe(message)
            case FoundCalls():
                future = self._open.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)
            case SiblingEnded():
                self._all[message.index].ended.set()

    async def find(self, names: Sequence[str], owner: str = "") -> list[tuple[str, list[str]]]:
        """Return the open calls that bear these names; see `FindCalls`."""
        return [call for found in await self._found(names, owner) for call in found.calls]

    async def notes(self, ids: Sequence[str], owner: str) -> dict[str, PrefixNote]:
        """Return what there is to say about the cached prefixes of an owner's requests."""
        return {one: note for found in await self._found(ids, owner) for one, note in found.notes.items()}

    async def _found(self, names: Sequence[str], owner: str) -> list[FoundCalls]:
        """Return all API workers' answers to `FindCalls`; one that does not answer in time counts as having none."""
        loop = asyncio.get_running_loop()
        asked = {secrets.token_hex(12): one for one in self._all.values() if one.serves}
        self._open |= {call: loop.create_future() for call in asked}
        futures = [self._open[call] for call in asked]
        try:
            for call, one in asked.items():
                one.outbox.send(FindCalls(call, list(names), owner))
            if futures:
                await asyncio.wait(futures, timeout=ANSWER_SECONDS)
            return [future.result() for future in futures if future.done()]
        finally:
            for call in asked:
                del self._open[call]

    def abort(self, ids: Sequence[str]) -> None:
        """End those of these requests that API workers have."""
        for one in self._all.values():
            one.outbox.send(AbortCalls(list(ids)))

    def answer_now(self, ids: Sequence[str]) -> None:
        """Let those of these requests that API workers have end their thinking."""
        for one in self._all.values():
            one.outbox.send(AnswerCalls(list(ids)))

    async def wait_until_ended(self) -> None:
        """Wait until no API worker has requests any more, after all were told to stop."""
        await asyncio.gather(*(one.ended.wait() for one in self._all.values()))

    def close(self) -> None:
        """Deliver the messages on their way, for a moment at most, and close the sockets."""
        self._context.destroy(linger=LINGER_MILLISECONDS)

    def _begin(self, message: SiblingStarted) -> None:
        """Take in an API worker that has started; if it replaces a dead one, restart its text workers first."""
        one = self._all[message.index]
        if one.pid:
            restarts, label = self._parts.counts.restarts, f"api-{message.index}"
            restarts[label] = restarts.get(label, 0) + 1
            one.busy.update(self._parts.topology.workers_of(message.index))
            for worker in one.busy:
                self._parts.restart_worker(worker)
        one.pid, one.serves, one.num_open = message.pid, False, 0
        one.health.mark_starting()
        self._let_serve(message.index)

    def _let_serve(self, index: int) -> None:
        one = self._all[index]
        if not self._is_started or not one.pid or one.busy or one.serves or self._parts.engines.ready is None:
            return
        for engine in self._parts.engines:
            if engine.ready is not None:
                one.outbox.send(engine.ready)
        for news in self._parts.news():
            one.outbox.send(news)
        own = self._parts.topology.workers_of(index)
        one.outbox.send(ServeNow({worker: self._parts.inbox_of_worker(worker) for worker in own}))
        one.serves = True
        one.health.started()

    def _observe(self, message: Observed) -> None:
        one = self._all[message.index]
        one.health.beats(Beat(part=api_name(message.index)))
        one.num_open = message.num_open
        self._parts.counts.lost_lines[api_name(message.index)] = message.num_lost_lines
        for seconds in message.first_tokens:
            self._observer.first_token(seconds)
        if message.between_tokens is not None:
            self._observer.between_tokens(message.between_tokens)
        for request in message.finished:
            self._observer.finished(request)
