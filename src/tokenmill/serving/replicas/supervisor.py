"""Start the engines and text workers of a server, receive their messages, and restart those that end or hang.

An engine is its ranks: when one of them dies, all are started again. The text workers are told, and decide where
requests go meanwhile; the owner knows the calls of a dead text worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zmq

from tokenmill.core.engine_messages import EngineProgress, EngineReady, EngineStats
from tokenmill.core.errors import DiskFull, EngineDead
from tokenmill.core.messages import SetPaused, ToApi, ToWorker
from tokenmill.core.part_messages import (
    Beat,
    Cleared,
    EngineBack,
    EngineDraining,
    EngineIdle,
    EngineLost,
    EngineMessage,
    EngineNews,
    Message,
    PartFailed,
    Ping,
    Pong,
    SignOfLife,
    Verdict,
)
from tokenmill.ipc.channels import API, Inbox, Outbox, engine_name, worker_name
from tokenmill.ipc.inbox_reader import InboxReader
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.stack_dump import stack_file
from tokenmill.ipc.standard_streams import num_lost_lines
from tokenmill.ipc.topology import EngineSpec
from tokenmill.serving.replicas.children import Child, ChildProcess, RunWorker, WorkerThread, end_of, patience
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.hang_watch import HangWatch
from tokenmill.serving.replicas.health import PartHealth
from tokenmill.serving.replicas.part import Owner, Part
from tokenmill.serving.replicas.restarts import PartCounts, Restarts
from tokenmill.serving.replicas.starter import Starter
from tokenmill.serving.replicas.trials import Trials


class Supervisor:
    """Runs the parts of one server beside the current event loop.

    Attributes:
        engines: handles of the engines. workers: the ways to the text workers, by their index.
        counts: counts of the parts' restarts and losses.
        topology: all parts, with those that are still starting.
    """

    def __init__(self, folder: Path, launch: LaunchFile, starter: Starter, run_worker: RunWorker, owner: Owner) -> None:
        """
        Args:
            folder: the folder of the launch file, in which the sockets are made.
            starter: starts the processes.
            run_worker: the loop of a text worker, for one that runs as a thread.
        """
        self._folder = folder
        self._patience = patience(launch.engine.kv_disk)
        self._launch, self.topology = launch, (topology := launch.topology)
        self._starter = starter
        self._run_worker = run_worker
        self._owner = owner
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[ToApi] = Inbox(self._context, folder, API, ToApi)
        self._reader = InboxReader(self._inbox, self._handle)
        self._worker_of = {worker_name(index): index for index in topology.workers}
        self._engine_of: dict[str, int] = {}
        self._parts: dict[str, Part] = {}
        self._part_at: dict[str, str] = {}
        self._lives: dict[str, int] = {}  # of engines that were removed
        self._restarts: dict[str, Restarts] = {}
        self._hangs = HangWatch(lambda name: self._send(name, Ping()), self._stacks, self._say, self._ticked)
        self._max_restarts = launch.server.max_restarts
        self.engines = Engines(self._engine(spec) for spec in topology.engines)
        for name, index in self._worker_of.items():
            self._add_part(name, starter.worker_module, str(index))
        self.workers: Sequence[Callable[[ToWorker], None]] = [self._to(name) for name in self._worker_of]
        self.counts = PartCounts()
        self._is_started = False
        self._returns: set[asyncio.Task[None]] = set()
        self._trials = Trials(folder)

    @property
    def trouble(self) -> str | None:
        """Sentences about the parts that hang or are being started again, or None."""
        return "; ".join(f"the {called} is recovering" for called in self._recovering()) or self._hangs.trouble

    @property
    def is_recovering(self) -> bool:
        """True while a part that has died is not fully back."""
        return bool(self._recovering())

    def _recovering(self) -> list[str]:
        engines = [engine for engine in self.engines if self._is_started and engine.ready is None]
        starting = [name for name in self._worker_of if self._is_started and self._hangs.parts[name].is_starting]
        names = [*starting, *(engine_name(engine.index) for engine in engines)]
        return [self._parts[name].called for name in names] or self._trials.under_trial

    async def start(self) -> list[EngineReady]:
        """Start all parts; return the engines' descriptions when they are ready."""
        for name in self._parts:
            await self._start(name)
        return await self.engines.wait_until_ready()

    def started(self) -> None:
        """Mark all parts as started: from now on each must answer in time, and is started again when it dies."""
        self._is_started = True
        self._hangs.started()

    async def run(self) -> None:
        """Listen and watch until cancelled."""
        self._reader.start()
        await self._hangs.run()

    async def stop(self) -> None:
        """End all parts."""
        tasks = [part.watcher for part in self._parts.values() if part.watcher is not None]
        for task in (*tasks, *self._returns):
            task.cancel()
        await asyncio.gather(*tasks, *self._returns, return_exceptions=True)
        await asyncio.gather(*(part.child.stop() for part in self._parts.values() if part.child is not None))
        self._reader.stop()
        self._context.destroy(linger=0)

    def inbox_of_worker(self, index: int) -> str:
        """Return the name of a text worker's inbox in its current life."""
        return self._parts[worker_name(index)].inbox

    def restart_worker(self, index: int) -> None:
        """End a text worker and all its work at once. It is started again as after any other death."""
        part = self._parts[worker_name(index)]
        self._trials.forget_worker(part.inbox, part.called)
        self._kill(worker_name(index), "the server, since the API process that it worked for has ended")

    # --- engines that come and go -----------------------------------------------------------------------------------

    async def add_engine(self, model: str = "", share: tuple[int, int] | None = None) -> EngineReady:
        """Start one more engine; return its description once it takes requests.

        Args:
            model: see `EngineSpec`, also for `share`.

        Raises:
            EngineDead, DiskFull: the engine cannot be started; EngineDead says why.
        """
        num_ranks = self.topology.engines[0].num_ranks
        spec = EngineSpec(self.engines.unused_index(), num_ranks, model, share)
        self._set_topology([*self.topology.engines, spec])
        handle = self._engine(spec)
        self.engines.add(handle)
        try:
            for name in spec.parts:
                await self._start(name)
            return await handle.wait_until_ready()
        except EngineDead:
            await self._forget(spec)
            raise

    def drain_engine(self, index: int, is_bound: bool = False) -> None:
        """Give an engine no new requests; see `EngineDraining`."""
        self.engines[index].drain(self._worker_of)
        self._tell_workers(EngineDraining(index, is_bound))

    async def remove_engine(self, index: int) -> None:
        """End an engine. Its requests go to the others at once."""
        self._tell_workers(EngineLost(index, is_removed=True))
        await self._forget(next(spec for spec in self.topology.engines if spec.index == index))

    async def _forget(self, spec: EngineSpec) -> None:
        for name in spec.parts:
            await self._bury(name)
            self._lives[name] = self._parts[name].life
            self._part_at.pop(self._parts[name].inbox)
            self._hangs.forget_part(name)
            del self._parts[name], self._engine_of[name], self._restarts[name]
        self.engines.remove(spec.index)
        self.topology = self.topology.with_engines([one for one in self.topology.engines if one.index != spec.index])
        with contextlib.suppress(DiskFull):  # the file names one too many then, which is not started
            self._set_topology(self.topology.engines)

    def _set_topology(self, engines: Sequence[EngineSpec]) -> None:
        """Set the engines for processes started from now on; on DiskFull, nothing has changed."""
        topology = self.topology.with_engines(engines)
        LaunchFile(self._launch.engine, self._launch.server, topology).write(self._folder)
        self.topology = topology

    # --- life and death of a part -----------------------------------------------------------------------------------

    def _add_part(self, name: str, module: str, *arguments: str) -> PartHealth:
        called, label, life = self.topology.parts[name], self.topology.label(name), self._lives.get(name, 0)
        inbox = f"{name}-life-{life}" if life else name
        outbox = Outbox(self._context, self._folder, inbox)
        self._parts[name] = Part(called, label, module, arguments, inbox, outbox, life)
        self._part_at[inbox] = name
        self._restarts[name] = Restarts(self._max_restarts)
        self._hangs.parts[name] = health = PartHealth(f"the {called}", self._launch.server.engine_timeout)
        return health

    def _engine(self, spec: EngineSpec) -> EngineHandle:
        health = []
        for rank, name in enumerate(spec.parts):
            health.append(self._add_part(name, self._starter.engine_module, str(spec.index), str(rank)))
            self._engine_of[name] = spec.index
        return EngineHandle(spec.index, self._to(engine_name(spec.index)), health)

    def _to(self, name: str) -> Callable[[Message], None]:
        """Return a function that sends to a part, whichever life it is in."""
        return lambda message: self._send(name, message)

    def _send(self, name: str, message: Message) -> None:
        outbox = self._parts[name].outbox
        if outbox is not None:
            outbox.send(message)

    async def _start(self, name: str) -> None:
        part = self._parts[name]
        if name in self._worker_of and self.topology.tokenizer_workers == 0:
            part.child = WorkerThread(self._folder, self._run_worker)
        else:
            process = self._starter.start(name, part.module, self._folder, part.arguments, part.life)
            stacks, work = stack_file(self._folder, part.inbox), partial(self._trials.work_of, part.inbox)
            part.child = ChildProcess(part.called, process, self._owner.line, stacks, work, self._patience)
        part.watcher = asyncio.ensure_future(self._end_with(name, part.child))

    async def _end_with(self, name: str, child: Child) -> None:
        how = await child.ended()
        # A child that can still say why sends it before it ends; let that arrive first.
        await asyncio.sleep(0.1)
        engine = self._engine_of.get(name)
        dead = self._parts[name if engine is None else engine_name(engine)]
        if dead.child not in (None, child) and not self._is_started:
            await end_of(dead.child)  # ranks that cannot start end for one reason, in any order; the first can say it
        if engine is not None and self.engines[engine].is_new:
            self.engines[engine].fail(how)
            return
        verdict = self._trials.died(dead.inbox, dead.called, engine is not None)
        can_return, is_explained = self._can_return(child), bool(verdict.convicted)
        pause = self._restarts[name].died(time.monotonic(), is_explained) if can_return else None
        if pause is None:
            self._owner.ended(1, how + (self._restarts[name].complaint if can_return else ""))
            return
        for own in self._with_ranks(name):
            self._parts[own].ignore()
        task = asyncio.ensure_future(self._return(name, pause, verdict))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)
        self._owner.died(self._parts[name].label, f"{how}{verdict.said}; it is started again")

    def _can_return(self, child: Child) -> bool:
        """Return True for a process, once the server has started: a thread cannot be killed and replaced."""
        return self._is_started and isinstance(child, ChildProcess)

    async def _return(self, name: str, pause: float, verdict: Verdict) -> None:
        """Start a part again: a text worker, or an engine with all its ranks."""
        engine = self._engine_of.get(name)
        names = self._with_ranks(name)
        for own in names:
            await self._bury(own)
        if engine is not None:
            self.engines[engine].lose()
            self._tell_workers(EngineLost(engine, verdict.suspects, verdict.convicted))
        await asyncio.sleep(pause)
        for own in names:
            part = self._parts[own]
            part.outbox = Outbox(self._context, self._folder, part.inbox)
            await self._start(own)
            self.counts.restarts[self._parts[own].label] = self._parts[own].life
        if engine is None:
            self._trials.forget_engines()
            index = self._worker_of[name]
            self._owner.replaced(index, worker_name(index, self._parts[name].life - 1), self.news(), verdict)

    def _with_ranks(self, name: str) -> list[str]:
        """Return the names of the parts that live and die together with this one."""
        engine = self._engine_of.get(name)
        return [name] if engine is None else [own for own, its in self._engine_of.items() if its == engine]

    async def _bury(self, name: str) -> None:
        """End the rest of a part and ignore it; give its next life another inbox."""
        part = self._parts[name]
        await part.end_process()
        self._part_at.pop(part.inbox, None)
        part.life += 1
        part.inbox = f"{name}-life-{part.life}"
        self._part_at[part.inbox] = name
        self._hangs.parts[name].mark_starting()

    def news(self) -> list[EngineNews]:
        """Return the state of all engines, for a receiver that knows nothing yet."""
        lives: list[EngineNews] = [
            EngineLost(engine.index) if engine.ready is None else EngineBack(engine.index, self._inbox_of(engine.index))
            for engine in self.engines
        ]
        return [*lives, *(EngineDraining(engine.index) for engine in self.engines if engine.is_draining)]

    def _inbox_of(self, engine: int) -> str:
        return self._parts[engine_name(engine)].inbox

    def _tell_workers(self, news: EngineNews) -> None:
        self._owner.told(news)
        for name in self._worker_of:
            self._send(name, news)

    def _engine_is_back(self, engine: int) -> None:
        handle = self.engines[engine]
        for part in handle.health:
            part.started()
        if handle.is_paused:
            self._send(engine_name(engine), SetPaused("", True))
        self._tell_workers(EngineBack(engine, self._inbox_of(engine)))

    # --- what they say ----------------------------------------------------------------------------------------------

    def _handle(self, message: ToApi) -> None:
        match message:
            case EngineProgress():
                if not self._is_started:
                    self._owner.progress(message)
            case EngineMessage() if message.engine in self.engines:
                self.engines[message.engine].handle_message(message)
                if isinstance(message, EngineReady | EngineStats):
                    self._owner.told(message)
                if isinstance(message, EngineReady) and self._is_started:
                    self._engine_is_back(message.engine)
            case PartFailed():
                self._note_failure(message)
            case Beat() | Pong():
                self._note_sign(message)
            case Cleared():
                self._trials.clear(message.ids)
            case EngineIdle():
                if message.engine in self.engines and message.worker in self._part_at:
                    self.engines[message.engine].note_idle(self._part_at[message.worker])
            case EngineMessage():
                pass  # it has been removed since
            case _:
                self._owner.answered(message)

    def _note_failure(self, message: PartFailed) -> None:
        """Report a part's reason for its end. Once the server has started, the end counts as a death."""
        name = self._part_at.get(message.part)
        if name is None:
            return
        engine = self._engine_of.get(name)
        if engine is not None and self.engines[engine].is_new:
            self.engines[engine].fail(message.error)
            return
        who = f"{self._parts[name].called}: " if self.topology.has_replicas else ""
        if self._is_started and self._max_restarts:
            self._owner.line(who + message.error)
        else:
            self._owner.ended(message.exit_code, who + message.error)

    def _note_sign(self, message: SignOfLife) -> None:
        name = self._part_at.get(message.part)
        if name is None:
            return
        health = self._hangs.parts[name]
        if self._is_started and health.is_starting and name in self._worker_of:
            health.started()
        self._hangs.note_sign(name, message)
        if isinstance(message, Beat):
            label = self._parts[name].label
            self.counts.dropped |= {label: message.num_dropped, API: self._inbox.num_dropped}
            self.counts.lost_lines |= {label: message.num_lost_lines, API: num_lost_lines()}

    # --- those that hang --------------------------------------------------------------------------------------------

    async def _stacks(self, name: str) -> str:
        child = self._parts[name].child
        return "it is being started" if child is None else await child.stacks()

    def _kill(self, name: str, by: str) -> None:
        """Kill the process of a part, if it has one."""
        child = self._parts[name].child
        if child is not None:
            child.kill(by)

    def _say(self, name: str, text: str) -> None:
        self._owner.hung(self._parts[name].label, text)

    def _ticked(self, name: str, health: PartHealth) -> None:
        is_hopeless = self._is_started and health.is_overdue and self._hangs.has_reported(name)
        if is_hopeless and self._max_restarts:
            self._kill(name, f"the watchdog after {health.delay:.1f} s without an answer")
        if name in self._worker_of:
            self._owner.ticked(self._worker_of[name], health.is_deaf, health.is_lost)
