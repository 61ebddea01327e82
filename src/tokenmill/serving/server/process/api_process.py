"""Run an API process: serve HTTP beside the engines and text workers, and end them all in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tokenmill.config.fields import sampling_overrides
from tokenmill.config.model_files import default_sampling
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import EngineDead, InvalidCheckpoint, InvalidRequest, TokenMillError
from tokenmill.core.messages import ToWorker
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import ParsersFound
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.log_lines import LineHandler
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.frontend.open_calls import OpenCalls
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.observe.metrics import Metrics
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.restarts import PartCounts
from tokenmill.serving.server.adapters import AdapterRegistry
from tokenmill.serving.server.context import ServerContext, ToolParsers
from tokenmill.serving.server.generation.tokens import tokenizer_info
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.errors import ServerStopping
from tokenmill.serving.server.http.listener import is_on_loopback
from tokenmill.serving.server.http.server import HttpServer, wind_up
from tokenmill.serving.server.http.unknown_fields import UnknownFields
from tokenmill.serving.server.media import MediaFetcher
from tokenmill.serving.server.operators.admin import public_settings
from tokenmill.serving.server.process.parser_choice import (
    NOTHING_FOUND,
    ParserChoice,
    choose_parsers,
    needs_finding,
)
from tokenmill.serving.server.process.screen import Screen
from tokenmill.serving.server.process.stop_signals import handled_by
from tokenmill.serving.server.script import read_script

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokenmill.serving.server.http.application import Application

try:
    from uvloop import run as run_loop
except ImportError:  # it has no build for every platform
    from asyncio import run as run_loop

_logger = logging.getLogger(__name__)

APP_MODULE = "tokenmill.serving.server.app"
# Less than what proxies wait for a stream that says nothing.
REMARK_SECONDS = 1.0
# How often a server without open requests looks whether it has some: each look wakes the machine.
UNUSED_SECONDS = 5.0


class Ending(msgspec.Struct, frozen=True):
    """The exit code and the reason of the server's end; a request to stop has no `error`."""

    exit_code: int = 0
    error: str | None = None


class Parts(Protocol):
    """The engines and text workers beside an API process; see `Supervisor`."""

    engines: Engines
    workers: Sequence[Callable[[ToWorker], None]]
    counts: PartCounts

    @property
    def trouble(self) -> str | None:
        """The reason why the parts are unhealthy; None: they are healthy."""

    @property
    def is_recovering(self) -> bool:
        """True while a part is being started again."""

    async def start(self) -> list[EngineReady]:
        """Wait until all parts are ready."""

    def started(self) -> None:
        """Tell the parts that they have all that they need."""

    async def run(self) -> None:
        """Receive messages from the parts until cancelled."""

    async def stop(self) -> None:
        """End the parts, or the connection to them."""


def run_process(make: Callable[[], ApiProcess], screen: Screen) -> int:
    """Run an API process in a loop of its own; return the exit code. Must be called in the main thread."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger().addHandler(LineHandler(write=screen.on_line))

    async def run() -> int:
        return await make().run()

    try:
        exit_code: int = run_loop(run())
        return exit_code
    except TokenMillError as error:
        screen.on_error(str(error))
        return error.exit_code


class ApiProcess(ABC):
    """An API process in the current event loop.

    Subclasses set `_parts`, `_metrics` and `_client` when they are made.
    """

    _parts: Parts
    _metrics: Metrics
    _client: EngineClient

    def __init__(self, launch: LaunchFile, listener: socket.socket | None, screen: Screen) -> None:
        """Prepare to serve on `listener`, which is bound; None: the app is served elsewhere, see `EmbeddedServer`."""
        loop = asyncio.get_running_loop()
        self._launch = launch
        self._server = launch.server
        self._listener = listener
        self._screen = screen
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._serving: list[tuple[HttpServer, asyncio.Task[None]]] = []
        self._choice = ParserChoice(ToolParsers(), [])
        self._log = EventLog(screen.on_line, launch.server.log_format == "json")

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
                await self._let_go()

    # --- start ------------------------------------------------------------------------------------------------------

    def _begin(self) -> list[asyncio.Task[None]]:
        """Start the tasks that run beside requests until they are cancelled."""
        return [asyncio.ensure_future(job) for job in (self._parts.run(), self._start(), self._remark(), *self._jobs())]

    @abstractmethod
    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Return further tasks that run beside requests."""

    async def _start(self) -> None:
        try:
            # What HTTP takes is imported while the engines load.
            ready, _ = await asyncio.gather(self._parts.start(), asyncio.to_thread(import_module, APP_MODULE))
            # What any of them takes.
            least = min(ready, key=lambda ready: ready.max_model_len)
            await self._client.start(least, sum(one.max_num_seqs for one in ready))
            self._parts.started()
            self._choice = choose_parsers(self._server, await self._find_parsers())
            await self._listen(least)
            self._begun(least)
        except TokenMillError as error:
            self._end(Ending(error.exit_code, str(error)))
        except Exception as error:
            _logger.exception("the server cannot start")
            self._end(Ending(1, f"the server cannot start: {type(error).__name__}: {error}"))

    async def _find_parsers(self) -> ParsersFound:
        """Return the parsers that suit the model, as far as a flag leaves them open."""
        if not needs_finding(self._server):
            return NOTHING_FOUND
        try:
            return await self._client.find_parsers()
        except InvalidRequest as error:  # the model can be served without
            return msgspec.structs.replace(NOTHING_FOUND, notation_reason=str(error), style_reason=str(error))

    @abstractmethod
    def _begun(self, ready: EngineReady) -> None:
        """Note that requests are accepted now."""

    async def _listen(self, ready: EngineReady) -> None:
        assert self._listener is not None, "who has none listens in another way"
        app = self._build_app(ready, is_on_loopback(self._listener))
        await self._serve(app, self._listener)
        # What has been loaded stays; going through it with each full collection would hold the loop up for long.
        gc.collect()
        gc.freeze()

    def _build_app(self, ready: EngineReady, on_loopback: bool) -> Application:
        app: Application = import_module(APP_MODULE).build_app(self._context(ready), self._server, on_loopback)
        return app

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        """Serve an application on a socket, with TLS on the one that clients know."""
        config = self._server
        if listener is not self._listener:
            config = replace(config, ssl_certfile=None, ssl_keyfile=None)
        http = HttpServer(app, config, listener, self._note_connections)
        serving = await http.start()
        serving.add_done_callback(lambda _: self._end(Ending(1, "the HTTP server ended unexpectedly")))
        self._serving.append((http, serving))

    def _context(self, ready: EngineReady) -> ServerContext:
        config, engine = self._server, self._launch.engine
        assert config.served_model_name, "launch gives it a name"
        return ServerContext(
            client=self._client,
            calls=OpenCalls(self._client),
            engines=self._parts.engines,
            ready=ready,
            metrics=self._metrics,
            model_name=config.served_model_name[0],
            model_names=config.served_model_name,
            tokenizer_info=partial(tokenizer_info, Path(engine.tokenizer or ready.model), config.chat_template),
            default_sampling=_checked_defaults(Path(ready.model))
            | sampling_overrides(config.override_generation_config),
            max_logprobs=config.max_logprobs,
            takes_priority=engine.scheduling_policy not in ("fair", "fcfs"),
            parsers=self._choice.parsers,
            sse_ping=config.sse_ping,
            settles_prompts=config.volatile_blocks == "move",
            script=read_script(config.script),
            settings=public_settings(engine, config),
            started=int(time.time()),
            trouble=self._trouble,
            log=self._log if config.enable_log_requests else None,
            adapters=AdapterRegistry(ready.adapters, config.lora_dir),
            media=MediaFetcher(config.allowed_media_domains, engine.media_limits()),
            bodies=BodyBudget(
                config.max_body_bytes_in_flight // config.api_server_count, UnknownFields(config.strict_fields)
            ),
        )

    # --- while it runs ----------------------------------------------------------------------------------------------

    def _trouble(self) -> str | None:
        """Return the reason why /health should fail; None: it should not."""
        if self._client.failure is not None:
            return str(self._client.failure)
        return self._parts.trouble

    def _spare(self, worker: int, is_deaf: bool, is_lost: bool) -> None:
        """Keep calls from a text worker that takes no messages, and end those that have waited for it too long."""
        self._client.avoid(worker, is_deaf)
        # One that is a process is started again instead.
        if is_lost and not (self._server.max_restarts and self._server.tokenizer_workers):
            self._client.lose(worker, EngineDead(f"text worker {worker} does not answer"))

    async def _remark(self) -> None:
        """Send a comment now and then on open streams while a part recovers."""
        while True:
            await asyncio.sleep(REMARK_SECONDS if self._client.num_open else UNUSED_SECONDS)
            if self._parts.is_recovering:
                self._client.remark()

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
        """Accept nothing new; give open replies their time to end, then an error, then drop them."""
        if not self._serving:
            return
        patience = self._server.shutdown_timeout if ending.error is None else 0.0

        def elsewhere() -> list[asyncio.Future[None]]:
            ends = self._ends_elsewhere()
            if patience and (count := self._client.num_open):
                who = "1 open request has" if count == 1 else f"{count} open requests have"
                self._screen.on_line(f"stopping: {who} {patience:g} s to end; Ctrl-C again ends what is open at once")
            return ends

        end_streams = partial(self._client.fail, ServerStopping("the server is stopping"))
        await wind_up(self._serving, elsewhere, patience, end_streams)

    def _ends_elsewhere(self) -> list[asyncio.Future[None]]:
        """Return futures that must end, beside this process's replies, before the parts are stopped."""
        return []

    async def _let_go(self) -> None:
        """Stop the parts after the last reply."""
        await self._parts.stop()


def _checked_defaults(folder: Path) -> dict[str, object]:
    """Return the model's default sampling parameters; refuse bad ones now rather than with every request."""
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
