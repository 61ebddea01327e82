"""Run an engine's process: sockets around an `Engine`.

    python -m tokenmill.startup.assembly.engine_process FOLDER INDEX RANK LIFE

One inbox (`engine-0.ipc`), one outbox per text worker and one to the API process, all unix sockets in the private
folder, all msgpack structs. It ends when it is told to (SIGTERM) or when its parent is gone (end of stdin).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import check_tokenizer
from tokenmill.core.engine_messages import EngineProgress
from tokenmill.core.errors import TokenMillError
from tokenmill.core.live import ShowTurns
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    ContinueRequest,
    Sleep,
    StepOutputs,
    ToEngine,
    TokenOutput,
)
from tokenmill.core.part_messages import LeaveWorker, PartFailed, Ping, Pong
from tokenmill.engine.kv.events import KVEventLog, changes_of
from tokenmill.engine.loop.control import answer, go_on
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.loop.kv_publisher import KVPublisher
from tokenmill.ipc.channels import LAST_WORD_MILLISECONDS, LINGER_MILLISECONDS, engine_name
from tokenmill.ipc.crash_attribution import MarkingExecutor, RunningPage, page_path
from tokenmill.ipc.engine_sockets import EngineSockets
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.interrupts import accept_signals, end_with_parent
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.log_lines import FORMAT_WITH_TIME, logged
from tokenmill.ipc.stack_dump import offer_stacks, stack_file
from tokenmill.ipc.topology import Topology
from tokenmill.serving.replicas.routing.reporter import Reporter

logger = logging.getLogger(__name__)

# How often counters are sent while steps run, in seconds.
STATS_INTERVAL = 0.25
# How long an engine with nothing to compute waits for messages before it looks at what else it has: leases, reports,
# replays of events. After so many looks in vain it waits for long.
IDLE_POLL_MS = 200
NUM_IDLE_POLLS = 20
REST_POLL_MS = 10_000
# How many times the timeout of a step may pass in a phase of the start without any progress: files come from far away,
# graphs are captured, kernels are compiled.
START_PATIENCE = 20.0
_DONE = object()


class EngineLoop:
    """Receive, step, publish, until told to stop.

    Args:
        idle_work: advances by an iteration of about a millisecond whenever there is nothing else to do.
        reporter: reports the engine's load to text workers that have several engines to choose from.
    """

    def __init__(
        self,
        engine: Engine,
        sockets: EngineSockets,
        publisher: KVPublisher | None,
        idle_work: Iterator[None],
        heartbeat: Heartbeat,
        reporter: Reporter | None = None,
    ) -> None:
        self._engine = engine
        self._heartbeat = heartbeat
        self._publisher = publisher
        self._idle_work: Iterator[None] | None = idle_work
        self._sockets = sockets
        self._reporter = reporter
        self._worker_of: dict[str, str] = {}
        self._stopping = False
        self._last_stats = 0.0

    def stop(self) -> None:
        """End the loop after the current step."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`."""
        num_idle = 0
        while not self._stopping:
            is_busy = self._engine.has_work and not self._engine.is_idle
            has_idle_work = self._idle_work is not None and not self._engine.has_work
            num_idle = 0 if self._engine.has_work or has_idle_work or self._publisher is not None else num_idle + 1
            self._heartbeat.rest()
            messages = self._sockets.receive(0 if is_busy or has_idle_work else self._patience(num_idle))
            self._heartbeat.begin_job("a step")
            for message in messages:
                self._publish(self._accept(message))
            if self._engine.has_work:
                self._publish(self._engine.step())
            elif self._idle_work is not None and next(self._idle_work, _DONE) is _DONE:
                self._idle_work = None
            self._publish_kv_events()
            self._send_stats(now=is_busy and not self._engine.has_work)

    @staticmethod
    def _patience(num_idle: int) -> int:
        return IDLE_POLL_MS if num_idle <= NUM_IDLE_POLLS else REST_POLL_MS

    def _publish_kv_events(self) -> None:
        events = self._engine.take_kv_events()
        if self._publisher is not None:
            self._publisher.publish(events)
            self._publisher.answer_replays()
        if self._reporter is not None:
            self._reporter.report(changes_of(events), self._engine.scheduler.requests, time.monotonic())

    def _accept(self, message: ToEngine) -> list[TokenOutput]:
        if isinstance(message, AbortRequests):
            outputs = self._engine.abort(message.ids)
            self._send_stats(now=True)
            return outputs
        if isinstance(message, Ping):
            self._sockets.send_to_api(Pong(self._sockets.name))
            return []
        if isinstance(message, LeaveWorker):
            self._leave(message.worker)
            return []
        if isinstance(message, ContinueRequest):
            return go_on(self._engine, message.request, self._publish)
        if isinstance(message, Sleep):
            self._idle_work = None  # it would take again what is given back
        if not isinstance(message, AddRequest):
            self._sockets.send_to_api(answer(self._engine, message, self._publish))
            if not isinstance(message, ShowTurns):
                self._send_stats(now=True)
            return []
        self._worker_of.setdefault(message.id, message.worker)
        return self._engine.add(message)

    def _leave(self, worker: str) -> None:
        """End the requests of a dead text worker unanswered: another worker sends them again with the tokens so far."""
        ids = [request_id for request_id, name in self._worker_of.items() if name == worker]
        self._engine.abort(ids)
        for request_id in ids:
            del self._worker_of[request_id]
        self._sockets.leave_worker(worker)

    def _publish(self, outputs: list[TokenOutput]) -> None:
        # First, so that a router that hears of a prompt's first token knows what is cached of it.
        self._publish_kv_events()
        by_worker: dict[str, list[TokenOutput]] = {}
        for output in outputs:
            by_worker.setdefault(self._worker_of[output.id], []).append(output)
            if output.finish_reason is not None:
                del self._worker_of[output.id]
        for worker, own in by_worker.items():
            self._sockets.send_to_worker(worker, StepOutputs(self._engine.scheduler.step, own))

    def _send_stats(self, now: bool) -> None:
        moment = time.monotonic()
        # An idle engine sends them too: they are the sign of life that /health goes by.
        if now or moment - self._last_stats >= STATS_INTERVAL:
            self._last_stats = moment
            self._sockets.send_to_api(self._engine.stats())


def serve(folder: Path, index: int, life: int = 0) -> int:
    """Build the engine of this index that FOLDER/launch.json describes and serve; returns the exit code."""
    sockets = EngineSockets(folder, index, life)
    linger = LAST_WORD_MILLISECONDS
    try:
        launch = LaunchFile.read(folder)
        with sockets.heartbeat(launch.server.engine_timeout) as heartbeat:
            config = launch.engine_config(index, life, folder=folder)
            _serve(config, launch.topology, index, sockets, heartbeat)
        linger = LINGER_MILLISECONDS
    except TokenMillError as error:
        sockets.send_to_api(PartFailed(sockets.name, str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine ends")
        sockets.send_to_api(PartFailed(sockets.name, f"the engine failed: {type(error).__name__}: {error}", 1))
        return 1
    finally:
        sockets.close(linger)
    return 0


def _serve(config: EngineConfig, topology: Topology, index: int, sockets: EngineSockets, heartbeat: Heartbeat) -> None:
    def report(phase: str, done: int, total: int) -> None:
        heartbeat.begin_job(phase, START_PATIENCE)
        sockets.send_to_api(EngineProgress(phase, done, total))

    check_tokenizer(config.model, config.tokenizer)
    # Here and not above: what computes takes long to load, with torch a second, and the start-up screen should say so.
    report("loading the engine", 0, 0)
    from tokenmill.startup.assembly.setup import build_engine

    built = build_engine(config, report)
    kv_events = config.kv_events()
    publisher = None if kv_events is None else KVPublisher(kv_events, index if topology.has_replicas else None)
    reporter = None
    if topology.has_replicas:
        built.engine.scheduler.kv.cache.events = log = KVEventLog()
        reporter = Reporter(sockets.send_to_worker, log.names)
        sockets.heed = reporter.heed
    page = RunningPage(page_path(sockets.folder, sockets.name))
    built.engine.executor = MarkingExecutor(built.engine.executor, built.engine.scheduler.in_flight, page)
    loop = EngineLoop(built.engine, sockets, publisher, built.idle_work, heartbeat, reporter)
    sockets.listen_for_signals()
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    # Before it is ready, so that a scrape of a fresh server finds the engine's metrics.
    sockets.send_to_api(built.engine.stats())
    sockets.send_to_api(built.ready)
    loop.run()
    built.engine.close()
    if publisher is not None:
        publisher.close()


def _wait_as_spare() -> bool:
    """Load what an engine is made of, and wait to be told that the launch file is there; False: nobody wants it."""
    import_module("tokenmill.startup.assembly.setup")
    import_module("tokenmill.platform.cpu")
    return os.read(0, 1) != b""


def main() -> int:
    """Entry point of the process."""
    accept_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    folder, (index, rank, life) = Path(sys.argv[1]), map(int, sys.argv[2:])
    if not LaunchFile.is_in(folder) and not _wait_as_spare():
        return 0
    end_with_parent()
    with logged(FORMAT_WITH_TIME):
        offer_stacks(stack_file(folder, engine_name(index, rank, life)))
        if rank == 0:
            return serve(folder, index, life)
        from tokenmill.startup.assembly.rank_process import serve_rank

        return serve_rank(folder, index, rank, life)


if __name__ == "__main__":
    sys.exit(main())
