"""`ReportedParts`: the engines and text workers of a server from the view of an API worker.

It takes the place of the `Supervisor` there, and never calls engines itself: the first API process answers the
server's operator.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from tokenmill.core.api_messages import (
    FromSibling,
    ServeNow,
    ServerEnds,
    ServerState,
    SiblingStarted,
    WorkerBack,
    WorkerTrouble,
)
from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.messages import ToSibling, ToWorker
from tokenmill.core.part_messages import EngineBack, EngineDraining, EngineLost
from tokenmill.ipc.channels import API, LINGER_MILLISECONDS, Inbox, Outbox, api_name
from tokenmill.ipc.inbox_reader import InboxReader
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.health import PartHealth
from tokenmill.serving.replicas.part import Owner
from tokenmill.serving.replicas.restarts import PartCounts


class ReportedParts:
    """An API worker's stand-in for `Supervisor`, with the attributes and methods needed to serve requests.

    Attributes:
        engines: the handles of the engines.
        workers: the ways to its own text workers.
        counts, trouble: empty; the first API process has them.
        is_recovering: a part is being started again.
    """

    def __init__(self, folder: Path, launch: LaunchFile, index: int, owner: Owner) -> None:
        """`index`: the index of this API process."""
        self._folder = folder
        self._index = index
        self._owner = owner
        self._timeout = launch.server.engine_timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[ToSibling] = Inbox(self._context, folder, api_name(index), ToSibling)
        self._reader = InboxReader(self._inbox, self._handle)
        self._first = Outbox(self._context, folder, API)
        own = launch.topology.workers_of(index)
        self._first_worker = own.start
        self._outboxes: dict[int, Outbox] = {}  # each from `ServeNow` on
        self.workers: Sequence[Callable[[ToWorker], None]] = [self._to(worker) for worker in own]
        self.engines = Engines([])
        self.counts = PartCounts()
        self.trouble = None
        self.is_recovering = False
        self._may_serve = asyncio.Event()

    def send(self, message: FromSibling) -> None:
        """Send a message to the first API process."""
        self._first.send(message)

    async def start(self) -> list[EngineReady]:
        """Wait until all parts are ready; return the engines' descriptions."""
        await self._may_serve.wait()
        return [engine.ready for engine in self.engines if engine.ready is not None]

    def started(self) -> None:
        """Do nothing: an API worker watches no parts."""

    async def run(self) -> None:
        """Listen until cancelled."""
        self._reader.start()
        self.send(SiblingStarted(self._index, os.getpid()))
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Deliver the messages on their way, for a moment at most, and close the sockets."""
        self._reader.stop()
        self._context.destroy(linger=LINGER_MILLISECONDS)

    def _to(self, worker: int) -> Callable[[ToWorker], None]:
        """Return a function that sends to a text worker, whichever life it is in."""
        return lambda message: self._outboxes[worker].send(message)  # noqa: PLW0108 - there is another one later

    def _handle(self, message: ToSibling) -> None:
        match message:
            case EngineReady():
                self._gain(message)
            case EngineStats() if message.engine in self.engines:
                self.engines[message.engine].handle_message(message)
                self._owner.told(message)
            case EngineLost() | EngineDraining() if message.engine in self.engines:
                self._lose(message)
            case EngineStats() | EngineLost() | EngineDraining() | EngineBack():
                pass  # of one that it has not been told of, or once more what `EngineReady` says
            case ServeNow():
                for worker, inbox in message.workers.items():
                    self._connect(worker, inbox)
                self._may_serve.set()
            case WorkerBack():
                self._connect(message.worker, message.inbox)
                self._owner.replaced(
                    message.worker - self._first_worker, message.retired, message.news, message.verdict
                )
            case WorkerTrouble():
                self._owner.ticked(message.worker - self._first_worker, message.is_deaf, message.is_lost)
            case ServerState():
                self.is_recovering = message.is_recovering
            case ServerEnds():
                self._owner.ended(message.exit_code, message.error)
            case _:
                self._owner.answered(message)

    def _connect(self, worker: int, inbox: str) -> None:
        if (outbox := self._outboxes.get(worker)) is not None:
            outbox.close(linger=0)
        self._outboxes[worker] = Outbox(self._context, self._folder, inbox)

    def _gain(self, ready: EngineReady) -> None:
        if ready.engine not in self.engines:
            health = [PartHealth(f"engine {ready.engine}", self._timeout)]
            self.engines.add(EngineHandle(ready.engine, lambda _: None, health))
        self.engines[ready.engine].handle_message(ready)

    def _lose(self, news: EngineLost | EngineDraining) -> None:
        engine = self.engines[news.engine]
        if isinstance(news, EngineDraining):
            engine.is_draining = True
        elif news.is_removed:
            self.engines.remove(news.engine)
        else:
            engine.lose()
