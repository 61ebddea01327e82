"""Starts the engines and text workers of a server, hears what they say, and notices when one of them ends or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from tokenmill.core.messages import (
    Beat,
    EngineMessage,
    EngineProgress,
    EngineReady,
    EngineStats,
    FromWorker,
    PartFailed,
    Ping,
    Pong,
    ToApi,
    ToWorker,
)
from tokenmill.ipc.channels import API, Inbox, Outbox, engine_name, worker_name
from tokenmill.ipc.inbox_reader import InboxReader
from tokenmill.ipc.stack_dump import stack_file
from tokenmill.replicas.children import Child, ChildProcess, RunWorker, WorkerThread
from tokenmill.replicas.engine_handle import EngineHandle
from tokenmill.replicas.engines import Engines
from tokenmill.replicas.hang_watch import HangWatch
from tokenmill.replicas.health import PartHealth
from tokenmill.replicas.launch_file import LaunchFile

WORKER_MODULE = "tokenmill.frontend.worker"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom a supervisor tells what.

    Attributes:
        ended: a part has ended or cannot go on, so that the server should: the exit code, and a sentence.
        hung: a part hangs or goes on: what to call it in a field, and a sentence with its stacks.
        answered: what a text worker says of requests.
        counted: an engine has sent its numbers.
        ticked: how a text worker does, several times a second.
        line: what children write to standard error.
    """

    ended: Callable[[int, str], None]
    hung: Callable[[str, str], None]
    answered: Callable[[FromWorker], None]
    counted: Callable[[], None]
    ticked: Callable[[int, PartHealth], None]
    progress: Callable[[EngineProgress], None]
    line: Callable[[str], None]


class Supervisor:
    """Runs the parts of one server beside the current event loop.

    Attributes:
        engines: the handles of the engines.
        workers: the ways to the text workers, by their index.
        num_dropped: messages that an inbox could not read since its process started, by the label of its part.
    """

    def __init__(
        self, folder: Path, launch: LaunchFile, engine_module: str, run_worker: RunWorker, owner: Owner
    ) -> None:
        """
        Args:
            folder: holds the launch file; the sockets come beside it.
            engine_module: runs as the process of an engine.
            run_worker: the loop of a text worker, for the one that is a thread.
        """
        self._folder = folder
        self._topology = launch.topology
        self._engine_module = engine_module
        self._run_worker = run_worker
        self._owner = owner
        self._children: dict[str, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[ToApi] = Inbox(self._context, folder, API, ToApi)
        self._reader = InboxReader(self._inbox, self._handle)
        self._called = self._topology.parts
        sends = {name: Outbox(self._context, folder, name).send for name in self._called}
        timeout = launch.server.engine_timeout
        parts = {name: PartHealth(f"the {called}", timeout) for name, called in self._called.items()}
        self._worker_of = {worker_name(index): index for index in self._topology.workers}
        handles = [
            EngineHandle(spec.index, sends[engine_name(spec.index)], [parts[name] for name in spec.parts])
            for spec in self._topology.engines
        ]
        self.engines = Engines(handles)
        self.workers: Sequence[Callable[[ToWorker], None]] = [sends[name] for name in self._worker_of]
        self.num_dropped: dict[str, int] = {}
        self._hangs = HangWatch(
            parts,
            ping=lambda name: sends[name](Ping()),
            stacks=lambda name: self._children[name].stacks(),
            say=lambda name, text: owner.hung(self._topology.label(name), text),
            on_tick=self._ticked,
        )

    @property
    def trouble(self) -> str | None:
        """What is wrong with the parts that hang; None: none does."""
        return self._hangs.trouble

    async def start(self) -> list[EngineReady]:
        """Start all parts; return what the engines say of themselves when they are ready."""
        for spec in self._topology.engines:
            for rank, name in enumerate(spec.parts):
                await self._start(name, self._engine_module, str(spec.index), str(rank))
        if self._topology.tokenizer_workers == 0:
            self._watch(worker_name(0), WorkerThread(self._folder, self._run_worker))
        else:
            for name, index in self._worker_of.items():
                await self._start(name, WORKER_MODULE, str(index))
        return await self.engines.wait_until_ready()

    def started(self) -> None:
        """All parts have what they need: from now on each must answer in time."""
        self._hangs.started()

    async def run(self) -> None:
        """Listen and watch until cancelled."""
        self._reader.start()
        await self._hangs.run()

    async def stop(self) -> None:
        """End all parts."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        self._reader.stop()
        self._context.destroy(linger=0)

    async def _start(self, name: str, module: str, *arguments: str) -> None:
        stacks = stack_file(self._folder, name)
        arguments = (str(self._folder), *arguments)
        self._watch(name, await ChildProcess.start(self._called[name], module, arguments, self._owner.line, stacks))

    def _watch(self, name: str, child: Child) -> None:
        self._children[name] = child
        self._watchers.append(asyncio.ensure_future(self._end_with(child)))

    async def _end_with(self, child: Child) -> None:
        how = await child.ended()
        # A child that can still say why sends it before it ends; let that arrive first.
        await asyncio.sleep(0.1)
        self._owner.ended(1, how)

    def _handle(self, message: ToApi) -> None:
        match message:
            case EngineProgress():
                self._owner.progress(message)
            case EngineMessage():
                self.engines[message.engine].take(message)
                if isinstance(message, EngineStats):
                    self._owner.counted()
            case PartFailed():
                who = f"{self._called[message.part]}: " if self._topology.has_replicas else ""
                self._owner.ended(message.exit_code, who + message.error)
            case Beat() | Pong():
                self._hangs.hear(message)
                if isinstance(message, Beat) and message.part in self._called:
                    self.num_dropped[self._topology.label(message.part)] = message.num_dropped
                    self.num_dropped[API] = self._inbox.num_dropped
            case _:
                self._owner.answered(message)

    def _ticked(self, name: str, part: PartHealth) -> None:
        if name in self._worker_of:
            self._owner.ticked(self._worker_of[name], part)
