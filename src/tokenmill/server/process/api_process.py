"""The API process while it runs: it starts the children, serves HTTP, and ends it all for whichever reason is first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.core.errors import EngineDead, InvalidCheckpoint, InvalidRequest, TokenMillError
from tokenmill.core.messages import EngineReady
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.frontend.admission_control import AdmissionLimits
from tokenmill.frontend.client import EngineClient
from tokenmill.ipc.log_lines import LineHandler
from tokenmill.model_files import default_sampling
from tokenmill.observe.event_log import EventLog
from tokenmill.observe.metrics import Metrics
from tokenmill.observe.throughput import ThroughputLog
from tokenmill.observe.traces import TraceExporter
from tokenmill.replicas.fleet import Fleet
from tokenmill.replicas.health import PartHealth
from tokenmill.replicas.launch_file import LaunchFile
from tokenmill.replicas.part import Owner
from tokenmill.replicas.supervisor import Supervisor
from tokenmill.server.context import ServerContext, ToolParsers
from tokenmill.server.generation.tokens import tokenizer_info
from tokenmill.server.http.body_budget import BodyBudget
from tokenmill.server.http.errors import ServerStopping
from tokenmill.server.http.listener import is_on_loopback
from tokenmill.server.http.server import HttpServer
from tokenmill.server.operators.admin import public_settings
from tokenmill.server.process.screen import OpenScreen, Screen
from tokenmill.server.process.served_batches import ServedBatches
from tokenmill.server.process.start_checks import check_sockets, check_start
from tokenmill.server.process.stop_signals import handled_by

if TYPE_CHECKING:  # it takes a third of a second
    from fastapi import FastAPI

try:
    from uvloop import run as run_loop
except ImportError:  # it has no build for every platform
    from asyncio import run as run_loop

_logger = logging.getLogger(__name__)

APP_MODULE = "tokenmill.server.app"
THROUGHPUT_SECONDS = 10.0
# Less than what proxies wait for a stream that says nothing.
REMARK_SECONDS = 1.0
# What streams get to send their last event after they have been told to end.
_LAST_EVENT_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the server ends: a request to stop has no `error`."""

    exit_code: int = 0
    error: str | None = None


def serve(
    folder: Path,
    launch: LaunchFile,
    listener: socket.socket,
    open_screen: OpenScreen,
    on_begun: Callable[[], None],
    engine_module: str,
) -> int:
    """Serve until something ends the server; return the exit code. Must be called in the main thread.

    Args:
        folder: private to this server: its sockets lie there.
        listener: bound; it may listen already, where another process has served before.
        open_screen: makes what is told of the start and of the life of the server.
        on_begun: called once requests are accepted.
        engine_module: the module that runs as the process of an engine.
    """
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    with open_screen() as screen:
        logging.getLogger().addHandler(LineHandler(write=screen.on_line))
        try:
            check_start(launch.server, launch.topology)
            check_sockets(folder, launch.topology)
            # The children have no use for the keys.
            LaunchFile(launch.engine, replace(launch.server, api_key=()), launch.topology).write(folder)

            async def run() -> int:
                return await ApiProcess(folder, launch, listener, screen, on_begun, engine_module).run()

            exit_code: int = run_loop(run())
            return exit_code
        except TokenMillError as error:
            screen.on_error(str(error))
            return error.exit_code


class ApiProcess:
    """Runs one server in the current event loop."""

    def __init__(
        self,
        folder: Path,
        launch: LaunchFile,
        listener: socket.socket | None,
        screen: Screen,
        on_begun: Callable[[], None],
        engine_module: str,
    ) -> None:
        """See `serve`. `listener`: None where others serve the app, see `EmbeddedServer`."""
        loop = asyncio.get_running_loop()
        self._engine = launch.engine
        self._server = server = launch.server
        self._listener = listener
        self._screen = screen
        self._on_begun = on_begun
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._log = EventLog(screen.on_line, server.log_format == "json")
        owner = Owner(
            ended=lambda exit_code, error: self._end(Ending(exit_code, error)),
            died=lambda part, text: self._log.note("death", text, part=part),
            are_open=lambda ids: self._client.still_open(ids),  # noqa: PLW0108 - as below
            replaced=lambda *worker: self._client.replace(*worker),  # noqa: PLW0108 - as below
            hung=lambda part, text: self._log.note("hang", text, part=part),
            answered=lambda message: self._client.dispatch(message),  # noqa: PLW0108 - the client comes later
            counted=lambda: self._client.note_queued(self._parts.engines.stats.num_queued),
            ticked=self._spare,
            progress=screen.on_progress,
            line=screen.on_line,
        )
        self._parts = Supervisor(folder, launch, engine_module, _run_worker, owner)
        name = server.served_model_name[0] if server.served_model_name else ""
        endpoint = server.otlp_traces_endpoint
        self._traces = None if endpoint is None else TraceExporter(endpoint, name)
        self._metrics = Metrics(self._parts.engines, self._parts.counts, server.metrics_prefix, name, self._traces)
        limits = AdmissionLimits(server.max_num_queued_reqs, server.max_num_queued_tokens)
        self._batches: ServedBatches | None = None
        if server.batch_dir is not None:
            self._batches = ServedBatches(server, lambda: self._client.has_waiting, self._metrics)
        self._client = EngineClient(self._parts.workers, self._metrics, limits, self._engine.seed)

    async def run(self) -> int:
        """Serve until something ends it; return the exit code."""
        with handled_by(self._stop_asked):
            tasks = self._begin()
            try:
                ending = await self._ending
                await self._close(ending)
                if ending.error is not None:
                    self._screen.on_error(ending.error)
                return ending.exit_code
            finally:
                await cancel(tasks)
                await self._parts.stop()
                if self._batches is not None:
                    await self._batches.close()

    # --- start ------------------------------------------------------------------------------------------------------

    def _begin(self) -> list[asyncio.Task[None]]:
        """Start what goes on beside requests, until it is cancelled."""
        jobs = [self._parts.run(), self._start(), self._log_throughput(), self._remark()]
        if self._traces is not None:
            jobs.append(self._traces.run())
        return [asyncio.ensure_future(job) for job in jobs]

    async def _start(self) -> None:
        try:
            # What HTTP takes is imported while the engines load.
            ready, _ = await asyncio.gather(self._parts.start(), asyncio.to_thread(import_module, APP_MODULE))
            # What any of them takes.
            least = min(ready, key=lambda ready: ready.max_model_len)
            await self._client.start(least, sum(one.max_num_seqs for one in ready))
            self._parts.started()
            await self._listen(least, sum(one.max_num_seqs for one in ready))
            self._on_begun()
            self._screen.on_ready(least)
        except TokenMillError as error:
            self._end(Ending(error.exit_code, str(error)))
        except Exception as error:
            _logger.exception("the server cannot start")
            self._end(Ending(1, f"the server cannot start: {type(error).__name__}: {error}"))

    async def _listen(self, ready: EngineReady, num_rows: int) -> None:
        assert self._listener is not None, "who has none listens in another way"
        app = self._build_app(ready, num_rows, is_on_loopback(self._listener))
        self._http = HttpServer(app, self._server, self._listener, self._note_connections)
        self._serving = await self._http.start()
        self._serving.add_done_callback(lambda _: self._end(Ending(1, "the HTTP server ended unexpectedly")))

    def _build_app(self, ready: EngineReady, num_rows: int, on_loopback: bool) -> FastAPI:
        config = self._server
        assert config.served_model_name, "launch gives it a name"
        context = ServerContext(
            client=self._client,
            engines=self._parts.engines,
            fleet=Fleet(self._parts),
            ready=ready,
            metrics=self._metrics,
            model_name=config.served_model_name[0],
            model_names=config.served_model_name,
            tokenizer_info=partial(tokenizer_info, Path(self._engine.tokenizer or ready.model), config.chat_template),
            default_sampling=_checked_defaults(Path(ready.model)),
            max_logprobs=config.max_logprobs,
            takes_priority=self._engine.scheduling_policy not in ("fair", "fcfs"),
            parsers=ToolParsers(
                notation=config.tool_call_parser or "",
                finds_calls=bool(config.enable_auto_tool_choice),
                reasoning=config.reasoning_parser or "",
            ),
            settings=public_settings(self._engine, config),
            started=int(time.time()),
            trouble=self._trouble,
            log=self._log if config.enable_log_requests else None,
            bodies=BodyBudget(config.max_body_bytes_in_flight),
            batches=None if self._batches is None else self._batches.service,
        )
        if self._batches is not None:
            self._batches.start(context, max(1, num_rows // 2))
        app: FastAPI = import_module(APP_MODULE).build_app(context, config, on_loopback)
        return app

    # --- while it runs ----------------------------------------------------------------------------------------------

    def _trouble(self) -> str | None:
        """Why /health should say no."""
        if self._client.failure is not None:
            return str(self._client.failure)
        return self._parts.trouble

    def _spare(self, worker: int, health: PartHealth) -> None:
        """Keep calls from a text worker that takes no messages, and end those that have waited for it too long."""
        self._client.avoid(worker, health.is_deaf)
        # One that is a process is started again instead.
        if health.is_lost and not (self._server.max_restarts and self._server.tokenizer_workers):
            self._client.lose(worker, EngineDead(f"{health.name} does not answer"))

    async def _remark(self) -> None:
        """While a part recovers, streams that have begun get a comment now and then."""
        while True:
            await asyncio.sleep(REMARK_SECONDS)
            if self._parts.is_recovering:
                self._client.remark()

    async def _log_throughput(self) -> None:
        log = ThroughputLog()
        while not self._server.disable_log_stats:
            await asyncio.sleep(THROUGHPUT_SECONDS)
            line = log.line(self._parts.engines.stats, THROUGHPUT_SECONDS)
            if line is not None:
                self._log.note("throughput", line)

    def _note_connections(self, line: str) -> None:
        self._log.note("connections", line)

    # --- end --------------------------------------------------------------------------------------------------------

    def _stop_asked(self) -> None:
        if self._ending.done():
            # The second Ctrl-C: do not wait for streams.
            self._client.fail(ServerStopping("the server is stopping"))
        self._end(Ending())

    def _end(self, ending: Ending) -> None:
        if self._ending.done():
            return
        self._ending.set_result(ending)
        if ending.error is not None:
            self._client.fail(EngineDead("the engine is not available; the server is stopping"))

    async def _close(self, ending: Ending) -> None:
        """Accept nothing new; give open replies their time to end, then an error, then nothing."""
        if self._http is None or self._serving is None:
            return
        self._http.stop()
        if self._batches is not None:
            await self._batches.stop()
        patience = self._server.shutdown_timeout if ending.error is None else 0.0
        if patience and (count := self._client.num_open):
            who = "1 open request has" if count == 1 else f"{count} open requests have"
            self._screen.on_line(f"stopping: {who} {patience:g} s to end; Ctrl-C again ends what is open at once")
        await asyncio.wait([self._serving], timeout=patience)
        self._client.fail(ServerStopping("the server is stopping"))
        await asyncio.wait([self._serving], timeout=_LAST_EVENT_SECONDS)
        self._http.abandon()
        await asyncio.wait([self._serving], timeout=_LAST_EVENT_SECONDS)
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


def _run_worker(folder: Path, index: int, alive_fd: int) -> int:
    """A text worker in a thread, with imports that others do without."""
    from tokenmill.frontend.worker import run_worker

    return run_worker(folder, index, alive_fd)


def _checked_defaults(folder: Path) -> dict[str, object]:
    """The model's default sampling parameters, refused now rather than with every request."""
    defaults = default_sampling(folder)
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"{folder / 'generation_config.json'}: {error}") from error
    return defaults


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
