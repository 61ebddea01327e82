"""A text worker: the sockets around `TextProcessor`, as a process or as a thread of the API process.

    python -m tokenmill.serving.frontend.worker FOLDER INDEX LIFE

It ends when its standard input ends, that is, when its parent has died.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import zmq

from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import TokenMillError
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    AnswerNow,
    GenerateText,
    StepOutputs,
    TextMessage,
    TokenOutput,
    ToWorker,
)
from tokenmill.core.part_messages import (
    Cleared,
    EngineBack,
    EngineDraining,
    EngineIdle,
    EngineLost,
    EngineReport,
    PartFailed,
    Ping,
    Pong,
    Retrial,
)
from tokenmill.core.request import FinishReason
from tokenmill.core.text_queries import DecodeTokens, EncodeText, FindParsers
from tokenmill.ipc.channels import API, LAST_WORD_MILLISECONDS, Inbox, Outbox, api_name, engine_name, worker_name
from tokenmill.ipc.crash_attribution import page_path
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.interrupts import accept_signals
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.ipc.log_lines import logged
from tokenmill.ipc.stack_dump import offer_stacks, stack_file
from tokenmill.ipc.topology import request_mark
from tokenmill.serving.frontend.attempt import Attempt
from tokenmill.serving.frontend.media_prompts import has_media
from tokenmill.serving.frontend.prepare_thread import PrepareThread
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.prompt_processor import Prepared, Question, ids_of
from tokenmill.serving.frontend.retrials import Retrials
from tokenmill.serving.frontend.template_budget import TakesLong
from tokenmill.serving.frontend.text_processor import Routed, TextProcessor
from tokenmill.serving.replicas.dispatcher import Dispatcher
from tokenmill.serving.replicas.routing.policies import policy_of
from tokenmill.serving.replicas.routing.router import Router
from tokenmill.serving.replicas.work_page import WorkPage

# A message of the first size takes some milliseconds, and many may come at once; one of the second takes seconds.
LONG_BYTES = 4 << 10
HUGE_BYTES = 1 << 20
# How many times --engine-timeout may pass until the tokenizer is loaded, and until a long text is prepared: nothing
# short waits for that.
START_PATIENCE = 20.0
PREPARE_PATIENCE = 4.0
KILLS_ENGINES = "the engine died twice while it ran this request; it is not tried again"

Sockets = tuple[Inbox[ToWorker], Outbox, Outbox, Dispatcher]
"""The inbox, and the ways to the supervisor, to the API process whose requests it has, and to the engines."""

Prepare = Callable[[Question, Attempt], Prepared]


def run_worker(folder: Path, index: int, alive_fd: int, life: int = 0) -> int:
    """Serve until `alive_fd` reaches its end; return the exit code. `life`: number of earlier restarts.

    A local model's tokenizer is loaded at once, a hub model's when the engine is ready: only then is its folder known.
    A tokenizer that fails to load is reported to the API process as `PartFailed`, once the engine is ready.
    """
    launch = LaunchFile.read(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToWorker] = Inbox(context, folder, worker_name(index, life), ToWorker)
    supervisor = Outbox(context, folder, API)
    api = Outbox(context, folder, api_name(launch.topology.api_of(index)))
    inboxes = {spec.index: engine_name(spec.index) for spec in launch.topology.engines}
    policy = launch.server.routing_policy if launch.topology.has_replicas else "fewest"
    router = Router(list(inboxes), policy_of(policy, last=index - 1))
    page = WorkPage(page_path(folder, inbox.name))
    predecessor = worker_name(index, life - 1) if life else ""
    engines = Dispatcher(inboxes, lambda name: Outbox(context, folder, name), router, predecessor, request_mark(index))
    try:
        with Heartbeat(context, folder, inbox, launch.server.engine_timeout) as heartbeat:
            _serve(launch, page, (inbox, supervisor, api, engines), alive_fd, heartbeat)
        return 0
    except TokenMillError as error:
        supervisor.send(PartFailed(inbox.name, str(error), error.exit_code))
        supervisor.close(LAST_WORD_MILLISECONDS)
        return error.exit_code
    finally:
        inbox.close()
        supervisor.close()
        api.close()
        engines.close()
        context.term()


def _serve(launch: LaunchFile, page: WorkPage, sockets: Sockets, alive_fd: int, heartbeat: Heartbeat) -> None:
    inbox, supervisor, api, engines = sockets
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    poller.register(alive_fd, zmq.POLLIN)
    loop: WorkerLoop | None = None
    early = _load_early(launch, inbox.name)
    try:
        while not _parent_is_gone(alive_fd, events := dict(poller.poll())):
            heartbeat.begin_job("finished messages")
            if loop is not None:
                loop.acknowledge(events)
            while (message := inbox.receive()) is not None:
                heartbeat.begin_job(f"a message ({type(message).__name__})")
                if isinstance(message, Ping):
                    supervisor.send(Pong(inbox.name))
                    continue
                if isinstance(message, EngineReady):
                    heartbeat.begin_job("loading the tokenizer", START_PATIENCE)
                    loaded = early.get(message.model) or _load(launch, message.model, inbox.name)
                    ways, seconds = (supervisor, api, engines), launch.server.prompt_timeout
                    loop = WorkerLoop(inbox.name, loaded.result(), ways, heartbeat, page, seconds)
                    caches = launch.engine.enable_prefix_caching
                    engines.begin_dispatch(inbox.name, message.page_size if caches else 0, message.fingerprint)
                    for fd in loop.fds:
                        poller.register(fd, zmq.POLLIN)
                if loop is None and isinstance(message, EngineLost | EngineBack | EngineDraining):
                    engines.apply_news(message)
                    continue
                if loop is None:
                    inbox.drop("it came before EngineReady")
                    continue
                loop.handle_message(message, inbox.num_bytes)
                loop.hand_on_finished()
            if loop is not None:
                loop.hand_on_finished()
            heartbeat.rest()
    finally:
        if loop is not None:
            loop.close()


class WorkerLoop:
    """Passes messages through a `TextProcessor`: short ones at once, long and huge ones in a thread each.

    So short messages do not wait for long ones, nor long ones for huge ones. Messages about a request go to its engine.

    Attributes:
        fds: one of them becomes readable when `hand_on_finished` has something to do.
    """

    def __init__(
        self,
        name: str,
        processor: TextProcessor,
        ways: tuple[Outbox, Outbox, Dispatcher],
        heartbeat: Heartbeat,
        page: WorkPage,
        seconds: float,
    ) -> None:
        """`name`: the inbox's; `ways`: as in `Sockets`; `page`, `seconds`: see `Desk`."""
        self._name = name
        self._processor = processor
        self._supervisor, self._api, self._engines = ways
        self._desk, long, huge = (Desk(processor.prepare, page, line, seconds) for line in range(3))
        self._long = PrepareThread(long.watched(heartbeat, "a long text", PREPARE_PATIENCE))
        self._huge = PrepareThread(huge.watched(heartbeat, "a huge text", PREPARE_PATIENCE))
        self._retrials = Retrials(lambda ids: self._supervisor.send(Cleared(ids)))
        self._threads = (self._long, self._huge)
        self.fds = [thread.fd for thread in self._threads]

    def handle_message(self, message: TextMessage | AnswerNow | EngineReport | Retrial, num_bytes: int) -> None:
        """Handle a message of `num_bytes` bytes, or let a thread begin it."""
        if isinstance(message, Retrial):
            self._retrials.begin_trials(message.suspects, message.ended)
            return
        if isinstance(message, GenerateText | EncodeText | DecodeTokens | FindParsers):
            self._prepare(message, num_bytes)
            return
        if isinstance(message, AnswerNow):
            self._engines.go_on(self._processor.endings(message.ids))
            return
        if isinstance(message, AbortRequests):
            self._abort(message.ids)
        if isinstance(message, EngineLost) and message.convicted:
            errors = [TokenOutput(one, [], FinishReason.ERROR, error=KILLS_ENGINES) for one in message.convicted]
            self.handle_message(StepOutputs(0, errors), 0)
        if isinstance(message, EngineReport):
            self._engines.heed(message)
        elif isinstance(message, EngineLost | EngineBack | EngineDraining):
            self._processor.resubmitted(self._engines.apply_news(message))
        elif not isinstance(message, StepOutputs) or self._engines.apply_outputs(message):
            self._send(self._processor.process(message))
        if cleared := self._engines.cleared():
            self._supervisor.send(Cleared(cleared))
        for engine in self._engines.idle():
            self._supervisor.send(EngineIdle(engine, self._name))

    def _prepare(self, message: Question, num_bytes: int) -> None:
        """Prepare a message now, or add it to the queue of `Retrials`."""
        if not self._retrials.holds_back:
            self._begin(message, num_bytes)
            return
        self._retrials.wait(message, num_bytes)
        self._go_on()

    def _begin(self, message: Question, num_bytes: int) -> None:
        is_alone = self._retrials.is_on
        thread = self._huge if num_bytes > HUGE_BYTES else self._long
        if not _takes_long(message, num_bytes):
            try:
                prepared = self._desk.prepare(message, is_hurried=not is_alone)
            except TakesLong:
                pass  # a thread has more time
            else:
                self._send(self._processor.start(message, prepared))
                self._retrials.finished(ids_of(message)[0])
                return
        thread.put(message)
        if is_alone:
            self._retrials.prepares(message)

    def _abort(self, ids: Sequence[str]) -> None:
        for thread in self._threads:
            thread.abort(ids)
        if self._retrials.holds_back:
            self._retrials.abort(ids)
            self._go_on()

    def _go_on(self) -> None:
        """Handle messages of the retrial queue until one must wait."""
        while (waiting := self._retrials.next()) is not None:
            message, num_bytes = waiting
            if isinstance(message, AbortRequests):
                self.handle_message(message, num_bytes)
            else:
                self._begin(message, num_bytes)

    def hand_on_finished(self) -> None:
        """Send on the messages that the threads have prepared."""
        for thread in self._threads:
            for message, prepared, aborted in thread.finished():
                self._send(self._processor.start(message, prepared))
                if aborted:  # its other continuations are wanted
                    self._send(self._processor.process(AbortRequests(aborted)))
        alone = self._retrials.alone
        if alone is not None and not any(thread.holds(alone) for thread in self._threads):
            self._retrials.finished(alone)
            self._go_on()

    def acknowledge(self, events: Container[object]) -> None:
        """Reset those of the `fds` that are readable; `hand_on_finished` must follow."""
        for thread in self._threads:
            if thread.fd in events:
                thread.acknowledge()

    def close(self) -> None:
        """Let the threads end."""
        for thread in self._threads:
            thread.close()

    def _send(self, routed: Routed) -> None:
        for message in routed.to_engine:
            if isinstance(message, AddRequest):
                self._engines.add(message)
            elif isinstance(message, AbortRequests):
                self._engines.abort(message.ids)
        for to_api in routed.to_api:
            self._api.send(to_api)


def _takes_long(message: Question, num_bytes: int) -> bool:
    """Return True for long texts, and for images, which another process decodes however short they are."""
    return num_bytes > LONG_BYTES or (isinstance(message, GenerateText | EncodeText) and has_media(message.messages))


def _load_early(launch: LaunchFile, name: str) -> dict[str, Future[TextProcessor]]:
    """Start to load a local model, while the engines load; return it by its folder, empty for a hub model."""
    folder = str(Path(launch.engine.model).expanduser())
    return {folder: _load(launch, folder, name)} if Path(folder).is_dir() else {}


def _load(launch: LaunchFile, folder: str, name: str) -> Future[TextProcessor]:
    """Load a text processor in a thread, so that early messages are answered meanwhile."""
    with_template = launch.server.chat_template
    pool = ThreadPoolExecutor(1, "load-tokenizer")
    loaded = pool.submit(load_text_processor, Path(folder), launch.engine, with_template, name)
    pool.shutdown(wait=False)
    return loaded


def _parent_is_gone(alive_fd: int, events: dict[object, int]) -> bool:
    return alive_fd in events and os.read(alive_fd, 1) == b""


class Desk:
    """Prepares messages, using one line of the `WorkPage` and, outside the loop's thread, one job of the heartbeat."""

    def __init__(self, prepare: Prepare, page: WorkPage, line: int, seconds: float) -> None:
        """
        Args:
            prepare: see `PromptProcessor.prepare`.
            line: the line of the page; each desk has its own.
            seconds: see `Attempt`.
        """
        self._prepare = prepare
        self._page = page
        self._line = line
        self._seconds = seconds

    def prepare(self, message: Question, is_hurried: bool = False) -> Prepared:
        """Prepare a message and return the result.

        Raises:
            TakesLong: a hurried attempt is not enough for it.
        """
        first = ids_of(message)[0]
        attempt = Attempt(self._seconds, is_hurried, lambda did: self._page.write(self._line, did, first))
        attempt.note("prepared")
        try:
            return self._prepare(message, attempt)
        finally:
            self._page.clear(self._line)

    def watched(self, heartbeat: Heartbeat, job: str, patience: float) -> Callable[[Question], Prepared]:
        """Return `prepare` for a thread of its own, reported to the heartbeat as `job`."""

        def work(message: Question) -> Prepared:
            heartbeat.begin_job(job, patience, thread=job)
            try:
                return self.prepare(message)
            finally:
                heartbeat.rest(thread=job)

        return work


def main() -> int:
    """Entry point of the process."""
    accept_signals()
    # Ctrl-C in a terminal reaches the whole group; the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, index, life = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with logged(level=logging.INFO):
        offer_stacks(stack_file(folder, worker_name(index, life)))
        exit_code = run_worker(folder, index, sys.stdin.fileno(), life)
    if exit_code == 0:
        # The parent is gone without having ended us, so it has not removed its folder either.
        shutil.rmtree(folder, ignore_errors=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
