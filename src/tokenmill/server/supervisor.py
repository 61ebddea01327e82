"""The API process while it runs: it starts the children, serves HTTP, and ends it all for whichever reason is first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import zmq

from tokenmill.channels import API, ENGINE, Inbox, Outbox, worker_name
from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.errors import EngineDead, InvalidCheckpoint, InvalidRequest, TokenMillError
from tokenmill.frontend.client import EngineClient
from tokenmill.frontend.engine_calls import EngineCalls
from tokenmill.frontend.queue_limit import QueueLimits
from tokenmill.messages import Done, EngineFailed, EngineProgress, EngineReady, EngineStats, RequestStates, ToApi
from tokenmill.model_files import default_sampling
from tokenmill.observe.event_log import EventLog
from tokenmill.observe.metrics import Metrics
from tokenmill.observe.throughput import ThroughputLog
from tokenmill.observe.traces import TraceExporter
from tokenmill.sampling_params import SamplingParams
from tokenmill.server.admin import public_settings
from tokenmill.server.app import build_app
from tokenmill.server.children import Child, ChildProcess, WorkerThread
from tokenmill.server.context import ServerContext
from tokenmill.server.errors import ServerStopping
from tokenmill.server.http_protocol import LimitedProtocol
from tokenmill.server.inbox_reader import InboxReader
from tokenmill.server.listener import explain
from tokenmill.server.pulse import Pulse
from tokenmill.server.stop_signals import handled_by
from tokenmill.server.tool_fields import ToolParsers

_logger = logging.getLogger(__name__)

THROUGHPUT_SECONDS = 10.0
# What streams get to send their last event after they have been told to end.
_LAST_EVENT_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Events:
    """Whom to tell what; see `launch.run`."""

    progress: Callable[[EngineProgress], None]
    ready: Callable[[EngineReady], None]
    error: Callable[[str], None]
    line: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the server ends: a request to stop has no `error`."""

    exit_code: int = 0
    error: str | None = None


class Supervisor:
    """Runs one server in the current event loop."""

    def __init__(
        self,
        folder: Path,
        engine: EngineConfig,
        server: ServerConfig,
        listener: socket.socket,
        events: Events,
        engine_module: str,
    ) -> None:
        """`folder` holds the launch file; `engine_module` runs as the engine process."""
        loop = asyncio.get_running_loop()
        self._folder = folder
        self._engine = engine
        self._server = server
        self._listener = listener
        self._events = events
        self._engine_module = engine_module
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._ready: asyncio.Future[EngineReady] = loop.create_future()
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._pulse = Pulse()
        name = server.served_model_name or ""
        endpoint = server.otlp_traces_endpoint
        self._traces = None if endpoint is None else TraceExporter(endpoint, name)
        self._metrics = Metrics(server.metrics_prefix, name, self._traces)
        self._log = EventLog(events.line, server.log_format == "json")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox: Inbox[ToApi] = Inbox(self._context, folder, API, ToApi)
        self._reader = InboxReader(inbox, self._handle)
        num_workers = max(1, server.tokenizer_workers)
        outboxes = [Outbox(self._context, folder, worker_name(index)) for index in range(num_workers)]
        limits = QueueLimits(server.max_num_queued_reqs, server.max_num_queued_tokens)
        self._client = EngineClient([outbox.send for outbox in outboxes], self._metrics, limits)
        self._engine_calls = EngineCalls(Outbox(self._context, folder, ENGINE).send)

    async def run(self) -> int:
        """Serve until something ends it; return the exit code."""
        with handled_by(self._stop_asked):
            self._reader.start()
            tasks = [asyncio.ensure_future(self._start()), asyncio.ensure_future(self._log_throughput())]
            if self._traces is not None:
                tasks.append(asyncio.ensure_future(self._traces.run()))
            try:
                ending = await self._ending
                await self._close(ending)
                if ending.error is not None:
                    self._events.error(ending.error)
                return ending.exit_code
            finally:
                await _cancel([*tasks, *self._watchers])
                await asyncio.gather(*(child.stop() for child in self._children))
                self._reader.stop()
                self._context.destroy(linger=0)

    # --- start ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            await self._start_children()
            ready = await self._ready
            self._metrics.engine_ready(ready)
            await self._client.start(ready)
            await self._listen(ready)
            self._events.ready(ready)
        except TokenMillError as error:
            self._end(Ending(error.exit_code, str(error)))
        except Exception as error:
            _logger.exception("the server cannot start")
            self._end(Ending(1, f"the server cannot start: {type(error).__name__}: {error}"))

    async def _start_children(self) -> None:
        folder, on_line = str(self._folder), self._events.line
        self._watch(await ChildProcess.start("engine", self._engine_module, [folder], on_line))
        if self._server.tokenizer_workers == 0:
            self._watch(WorkerThread(self._folder))
        for index in range(self._server.tokenizer_workers):
            name, arguments = f"text worker {index}", [folder, str(index)]
            self._watch(await ChildProcess.start(name, "tokenmill.frontend.worker", arguments, on_line))

    def _watch(self, child: Child) -> None:
        self._children.append(child)
        self._watchers.append(asyncio.ensure_future(self._end_with(child)))

    async def _end_with(self, child: Child) -> None:
        how = await child.ended()
        # A child that can still say why sends it before it ends; let that arrive first.
        await asyncio.sleep(0.1)
        self._end(Ending(1, how))

    async def _listen(self, ready: EngineReady) -> None:
        config = self._server
        assert config.served_model_name is not None, "launch gives it a name"
        context = ServerContext(
            client=self._client,
            engine=self._engine_calls,
            ready=ready,
            metrics=self._metrics,
            model_name=config.served_model_name,
            default_sampling=_checked_defaults(Path(ready.model)),
            max_logprobs=config.max_logprobs,
            takes_priority=self._engine.scheduling_policy == "priority",
            parsers=ToolParsers(
                notation=config.tool_call_parser or "",
                finds_calls=bool(config.enable_auto_tool_choice),
                reasoning=config.reasoning_parser or "",
            ),
            settings=public_settings(self._engine, config),
            started=int(time.time()),
            trouble=self._trouble,
            log=self._log if config.enable_log_requests else None,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                build_app(context, config),
                loop="none",
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=3600,  # `_close` keeps the time
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            )
        )
        # Listening here, and not in uvicorn, lets a port that was taken meanwhile be told from other errors.
        try:
            self._listener.listen(2048)
        except OSError as error:
            raise explain(error, config) from error
        self._serving = asyncio.ensure_future(self._http.serve(sockets=[self._listener]))
        self._serving.add_done_callback(lambda _: self._end(Ending(1, "the HTTP server ended unexpectedly")))
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0.005)

    # --- while it runs ----------------------------------------------------------------------------------------------

    def _handle(self, message: ToApi) -> None:
        self._pulse.beat()
        match message:
            case EngineStats():
                self._metrics.engine_stats(message)
                self._client.note_queued(message.num_queued)
                self._pulse.note_stuck(message.is_stuck)
            case EngineProgress():
                self._events.progress(message)
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)
            case EngineFailed():
                self._end(Ending(message.exit_code, message.error))
            case Done() | RequestStates():
                self._engine_calls.dispatch(message)
            case _:
                self._client.dispatch(message)

    def _trouble(self) -> str | None:
        """Why /health should say no."""
        if self._client.failure is not None:
            return str(self._client.failure)
        return self._pulse.trouble(self._client.num_open)

    async def _log_throughput(self) -> None:
        log = ThroughputLog()
        while not self._server.disable_log_stats:
            await asyncio.sleep(THROUGHPUT_SECONDS)
            line = log.line(self._metrics.stats, THROUGHPUT_SECONDS)
            if line is not None:
                self._log.note("throughput", line)

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
        self._http.should_exit = True
        patience = self._server.shutdown_timeout if ending.error is None else 0.0
        if patience and (count := self._client.num_open):
            who = "1 open request has" if count == 1 else f"{count} open requests have"
            self._events.line(f"stopping: {who} {patience:g} s to end; Ctrl-C again ends what is open at once")
        await asyncio.wait([self._serving], timeout=patience)
        self._client.fail(ServerStopping("the server is stopping"))
        await asyncio.wait([self._serving], timeout=_LAST_EVENT_SECONDS)
        # What is still open now belongs to clients that do not read. uvicorn would show a traceback for each.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._http.force_exit = True
        await asyncio.wait([self._serving], timeout=_LAST_EVENT_SECONDS)
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the supervisor decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _checked_defaults(folder: Path) -> dict[str, object]:
    """The model's default sampling parameters, refused now rather than with every request."""
    defaults = default_sampling(folder)
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"{folder / 'generation_config.json'}: {error}") from error
    return defaults


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
