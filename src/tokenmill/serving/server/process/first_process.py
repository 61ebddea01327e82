"""Run the first API process of a server, usually the only one: it starts and watches the engines and text workers.

It also answers operators.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.core.api_messages import AbortCalls, AnswerCalls, FindCalls, FromSibling
from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.messages import FromWorker
from tokenmill.core.part_messages import EngineNews, Verdict
from tokenmill.ipc.channels import http_path
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.serving.frontend.admission_control import AdmissionLimits
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.frontend.open_calls import OpenCalls
from tokenmill.serving.observe.metrics import PREFIX, Metrics
from tokenmill.serving.observe.traces import TraceExporter
from tokenmill.serving.replicas.api_workers.api_workers import ApiWorkers
from tokenmill.serving.replicas.fleet import Fleet
from tokenmill.serving.replicas.part import Owner
from tokenmill.serving.replicas.starter import Starter
from tokenmill.serving.replicas.supervisor import Supervisor
from tokenmill.serving.server.live_hub import LiveHub
from tokenmill.serving.server.openai.line_answers import LineAnswers
from tokenmill.serving.server.process.api_process import ApiProcess, Ending, run_process
from tokenmill.serving.server.process.screen import OpenScreen, Screen
from tokenmill.serving.server.process.served_batches import ServedBatches
from tokenmill.serving.server.process.start_checks import check_sockets, check_start
from tokenmill.serving.server.response_files import ResponseFiles
from tokenmill.serving.server.response_store import ResponseStore
from tokenmill.serving.server.retrieval.routes import retrieval_handlers
from tokenmill.serving.server.session_store import SessionCollector, SessionStore

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokenmill.serving.server.context import ServerContext

THROUGHPUT_SECONDS = 10.0
API_WORKERS_SECONDS = 1.0
# Between two looks at whether anything was done.
IDLE_SECONDS = 5.0
# From readiness to the first request, at least.
FIRST_REQUEST_SECONDS = 60.0


def serve(
    folder: Path,
    launch: LaunchFile,
    listener: socket.socket,
    open_screen: OpenScreen,
    on_begun: Callable[[], None],
    starter: Starter,
) -> int:
    """Serve until something ends the server; return the exit code. Must be called in the main thread.

    Args:
        folder: private to this server, for the launch file and the sockets.
        listener: bound; it may listen already, where another process has served before.
        open_screen: opens the screen that shows the start and the life of the server.
        on_begun: called once requests are accepted.
        starter: starts the parts, or has started them already.
    """
    with open_screen() as screen:

        def make() -> ApiProcess:
            check_start(launch.server, launch.topology)
            check_sockets(folder, launch.topology)
            return FirstProcess(folder, launch, listener, screen, on_begun, starter)

        return run_process(make, screen)


class FirstProcess(ApiProcess):
    """The `ApiProcess` that owns the supervisor, the metrics, the batches and the live view."""

    _parts: Supervisor

    def __init__(
        self,
        folder: Path,
        launch: LaunchFile,
        listener: socket.socket | None,
        screen: Screen,
        on_begun: Callable[[], None],
        starter: Starter,
    ) -> None:
        """Make the supervisor and what belongs to it; the arguments are those of `serve`."""
        super().__init__(launch, listener, screen)
        server = launch.server
        self._folder = folder
        self._on_begun = on_begun
        self._serves = asyncio.Event()
        owner = Owner(
            ended=lambda exit_code, error: self._end(Ending(exit_code, error)),
            died=lambda part, text: self._log.note("death", text, part=part),
            replaced=self._replaced,
            hung=lambda part, text: self._log.note("hang", text, part=part),
            answered=self._answered,
            told=self._told,
            ticked=self._ticked,
            progress=screen.on_progress,
            line=screen.on_line,
        )
        self._parts = Supervisor(folder, launch, starter, _run_worker, owner)
        name = server.served_model_name[0] if server.served_model_name else ""
        endpoint = server.otlp_traces_endpoint
        self._traces = None if endpoint is None else TraceExporter(endpoint, name)
        self._metrics = Metrics(self._parts.engines, self._parts.counts, server.metrics_prefix, name, self._traces)
        self._sessions = SessionStore()
        self._metrics.show(SessionCollector(PREFIX, self._sessions))
        kept = None if server.responses_dir is None else ResponseFiles(Path(server.responses_dir))
        self._responses = ResponseStore(kept)
        self._batches: ServedBatches | None = None
        if server.batch_dir is not None:
            self._batches = ServedBatches(server, lambda: self._client.has_waiting)
            self._metrics.show(self._batches.collector)
        self._live = LiveHub(self._parts.engines)
        own = launch.topology.workers_of(0)
        limits = AdmissionLimits.from_config(server)
        self._client = EngineClient(self._parts.workers[: len(own)], self._metrics, limits, launch.engine.seed)
        self._api_workers: ApiWorkers | None = None
        if launch.topology.api_workers:
            self._api_workers = ApiWorkers(folder, self._parts, server.engine_timeout, self._metrics)

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        jobs = [self._log_throughput()]
        if self._server.ttl:
            jobs.append(self._leave_when_idle(self._server.ttl))
        if self._traces is not None:
            jobs.append(self._traces.run())
        if self._api_workers is not None:
            jobs.append(self._watch(self._api_workers))
        return jobs

    async def _listen(self, ready: EngineReady) -> None:
        await super()._listen(ready)
        if self._api_workers is not None:
            self._api_workers.started()

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        if self._api_workers is not None:
            private = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            private.bind(str(http_path(self._folder)))
            await super()._serve(app, private)
        await super()._serve(app, listener)

    def _begun(self, ready: EngineReady) -> None:
        self._on_begun()
        self._serves.set()
        self._screen.on_ready(ready, self._choice.facts)

    def _context(self, ready: EngineReady) -> ServerContext:
        context = msgspec.structs.replace(
            super()._context(ready),
            calls=OpenCalls(self._client, self._api_workers),
            fleet=Fleet(self._parts),
            batches=None if self._batches is None else self._batches.service,
            live=self._live,
            responses=self._responses,
            sessions=self._sessions,
        )
        if self._batches is not None:
            answers = LineAnswers(context, retrieval_handlers(context))
            self._batches.start(answers.answer, max(1, self._client.num_rows // 2))
        return context

    # --- what the parts say -----------------------------------------------------------------------------------------

    def _answered(self, message: FromWorker | FromSibling | FindCalls | AbortCalls | AnswerCalls) -> None:
        if isinstance(message, FromSibling):
            assert self._api_workers is not None, "only an API worker says this"
            self._api_workers.handle_message(message)
        elif not isinstance(message, FindCalls | AbortCalls | AnswerCalls):
            self._client.dispatch(message)

    def _told(self, message: EngineReady | EngineStats | EngineNews) -> None:
        if isinstance(message, EngineStats):
            self._client.note_queued(self._parts.engines.stats.num_queued)
        if self._api_workers is not None:
            self._api_workers.told(message)

    def _replaced(self, worker: int, retired: str, news: Sequence[EngineNews], verdict: Verdict) -> None:
        if worker < self._client.num_workers:
            self._client.replace(worker, retired, news, verdict)
        elif self._api_workers is not None:
            self._api_workers.worker_back(worker, retired, news, verdict)

    def _ticked(self, worker: int, is_deaf: bool, is_lost: bool) -> None:
        if worker < self._client.num_workers:
            self._spare(worker, is_deaf, is_lost)
        elif self._api_workers is not None:
            self._api_workers.worker_ticked(worker, is_deaf, is_lost)

    # --- while it runs ----------------------------------------------------------------------------------------------

    def _trouble(self) -> str | None:
        return super()._trouble() or (None if self._api_workers is None else self._api_workers.trouble)

    async def _watch(self, api_workers: ApiWorkers) -> None:
        while True:
            await asyncio.sleep(API_WORKERS_SECONDS)
            api_workers.pass_time(API_WORKERS_SECONDS, self._parts.is_recovering)

    async def _log_throughput(self) -> None:
        log = ThroughputLog()
        while not self._server.disable_log_stats:
            await asyncio.sleep(THROUGHPUT_SECONDS)
            line = log.line(self._parts.engines.stats, THROUGHPUT_SECONDS)
            if line is not None:
                self._log.note("throughput", line)

    async def _leave_when_idle(self, ttl: float) -> None:
        """End the server once its engines have had nothing to do for `ttl` seconds.

        Whoever has started it gets time to ask: at first it waits for `FIRST_REQUEST_SECONDS` at least.
        """
        loop, before = asyncio.get_running_loop(), (0, 0, 0, 0)
        await self._serves.wait()
        since = loop.time() + max(0.0, FIRST_REQUEST_SECONDS - ttl)
        while True:
            await asyncio.sleep(min(ttl, IDLE_SECONDS))
            stats = self._parts.engines.stats
            work = (stats.prompt_tokens, stats.generation_tokens, stats.num_running, stats.num_waiting)
            if work != before or stats.num_running or stats.num_waiting:
                since, before = loop.time(), work
            elif loop.time() - since >= ttl:
                self._log.note("idle", f"no request for {ttl:g} s (--ttl): the server ends")
                self._end(Ending())

    # --- end --------------------------------------------------------------------------------------------------------

    def _end(self, ending: Ending) -> None:
        if self._api_workers is not None and ending.error is not None and not self._ending.done():
            self._api_workers.announce_end(ending.exit_code, ending.error)
        super()._end(ending)

    def _ends_elsewhere(self) -> list[asyncio.Future[None]]:
        self._live.close()  # a viewer would stay for ever
        ends = [] if self._batches is None else [self._batches.stop()]
        ends += [] if self._api_workers is None else [self._api_workers.wait_until_ended()]
        return [asyncio.ensure_future(end) for end in ends]

    async def _let_go(self) -> None:
        await super()._let_go()
        await self._responses.close()
        if self._api_workers is not None:
            self._api_workers.close()
        if self._batches is not None:
            await self._batches.close()


def _run_worker(folder: Path, index: int, alive_fd: int) -> int:
    """Run a text worker in a thread; its imports are not needed elsewhere in this process."""
    from tokenmill.serving.frontend.worker import run_worker

    return run_worker(folder, index, alive_fd)


class ThroughputLog:
    """Turns the engines' counters into rates."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0

    def line(self, stats: EngineStats, seconds: float) -> str | None:
        """Return the line for the last `seconds`, from the counts of all engines; None if nothing happened."""
        # An engine that is started again counts from nothing again.
        prompt = max(0, stats.prompt_tokens - self._prompt_tokens)
        generation = max(0, stats.generation_tokens - self._generation_tokens)
        drafts = max(0, stats.num_draft_tokens - self._draft_tokens)
        accepted = max(0, stats.num_accepted_tokens - self._accepted_tokens)
        self._prompt_tokens, self._generation_tokens = stats.prompt_tokens, stats.generation_tokens
        self._draft_tokens, self._accepted_tokens = stats.num_draft_tokens, stats.num_accepted_tokens
        if not (prompt or generation):
            return None
        pinned = stats.num_pages_pinned / max(1, stats.num_pages)
        hits = stats.prefix_hits / max(1, stats.prefix_queries)
        right = f", drafts right {accepted / drafts:.1%} of {drafts / seconds:.1f} tok/s" if drafts else ""
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, prompt {prompt / seconds:.1f} tok/s, "
            f"output {generation / seconds:.1f} tok/s, KV {pinned:.1%}, prefix cache hits {hits:.1%}{right}"
        )
