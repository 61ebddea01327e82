"""Send a text worker's requests to the engines: each to one of them, and to another when that one dies.

A request that no engine can take now stays in the journal until one can: an accepted request is never lost. Requests
that ran when an engine died are suspects: they go out one after the other, each once the one before it has proved
harmless. Other requests do not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from tokenmill.core.messages import AbortRequests, AddRequest, ContinueRequest, StepOutputs, TokenOutput
from tokenmill.core.part_messages import (
    EngineBack,
    EngineDraining,
    EngineLost,
    EngineNews,
    EngineReport,
    LeaveWorker,
    WatchEngine,
)
from tokenmill.core.sampling_params import Grammar
from tokenmill.ipc.channels import Outbox
from tokenmill.serving.replicas.routing.router import Router

# A step further than the one at which its engine died, which may have launched one more by then.
HARMLESS_OUTPUTS = 2


class Dispatcher:
    """Owns the outboxes to the engines, the router and the journal of one text worker."""

    def __init__(
        self,
        engines: Mapping[int, str],
        connect: Callable[[str], Outbox],
        router: Router,
        predecessor: str = "",
        mark: str = "",
    ) -> None:
        """
        Args:
            engines: the inboxes of the engines, by their index.
            connect: opens an outbox to an inbox.
            predecessor: the inbox of the dead text worker that this one replaces.
            mark: the prefix of its requests' ids, and of no others; empty: it is the only text worker.
        """
        self._connect_to = connect
        self._predecessor = predecessor
        self._mark = mark
        self._watcher = ""
        self._inboxes = dict(engines)
        self._outboxes = {engine: self._connect(inbox) for engine, inbox in engines.items()}
        self._retired: set[str] = set()
        self._router = router
        self._journal = Journal()
        self._suspects: dict[str, int] = {}  # the outputs that each still has to bring
        self._trial: str | None = None
        self._cleared: list[str] = []
        self._draining: set[int] = set()

    def begin_dispatch(self, worker: str, page_size: int, fingerprint: str) -> None:
        """Begin once the engines are ready; have them report to this text worker if the routing policy needs reports.

        Args:
            worker: the text worker's inbox.
            page_size, fingerprint: see `PrefixIndex`.
        """
        if self._router.policy.reads_cache:
            self._router.begin_routing(page_size, fingerprint)
            self._watcher = worker
            for outbox in self._outboxes.values():
                outbox.send(WatchEngine(worker))

    def heed(self, report: EngineReport) -> None:
        """Take in an engine's report, unless that engine has died."""
        if report.source not in self._retired:
            self._router.apply_report(report)

    def add(self, request: AddRequest) -> None:
        """Accept a request and send it to an engine if one can take it."""
        self._journal.accept(request)
        self._place(request)

    def abort(self, ids: Iterable[str]) -> None:
        """End requests, whether they run or wait."""
        ids = list(ids)
        self._journal.leave(ids)
        self._clear(ids)
        for engine, own in self._router.leave(ids).items():
            self._outboxes[engine].send(AbortRequests(own))

    def go_on(self, grammars: Mapping[str, Grammar]) -> None:
        """Let requests go on under other grammars, in the engine that runs them or the next one."""
        for request in self._journal:
            if request.id not in grammars:
                continue
            request.params = msgspec.structs.replace(request.params, grammar=grammars[request.id])
            engine = self._router.engine_of(request.id)
            if engine is not None and engine in self._outboxes:
                self._outboxes[engine].send(ContinueRequest(request))

    def apply_outputs(self, message: StepOutputs) -> bool:
        """Take in the outputs of a step; return False, and ignore them, if their engine has died."""
        if message.source in self._retired:
            return False
        self._router.ended(message.outputs)
        self._journal.record_outputs(message.outputs)
        if self._suspects:
            self._watch(message.outputs)
        return True

    def cleared(self) -> list[str]:
        """Return the suspects that have ended or proved harmless since the last call."""
        cleared, self._cleared = self._cleared, []
        return cleared

    def idle(self) -> list[int]:
        """Return the draining engines that have run out of requests since the last call."""
        if not self._draining:
            return []
        busy = {self._router.engine_of(request.id) for request in self._journal}
        idle = self._draining - busy - {request.engine for request in self._journal}
        self._draining -= idle
        return sorted(idle)

    def apply_news(self, news: EngineNews) -> list[AddRequest]:
        """Take in that an engine has died, is back, or takes no new requests.

        Returns:
            The requests that are sent out again.
        """
        match news:
            case EngineBack():
                self._gain(news.engine, news.inbox)
            case EngineDraining():
                self._drain(news)
            case EngineLost():
                self._lose(news.engine)
                if news.is_removed:
                    self._remove(news.engine)
                own = {request.id for request in self._journal}
                self._suspects |= dict.fromkeys(own.intersection(news.suspects), HARMLESS_OUTPUTS)
                # These have ended since.
                self._cleared += [one for one in news.suspects if one.startswith(self._mark) and one not in own]
                if self._trial is not None and self._trial not in self._router:
                    self._trial = None
        return [request for request in self._journal if request.id not in self._router and self._place(request)]

    def close(self) -> None:
        """Close the outboxes."""
        for outbox in self._outboxes.values():
            outbox.close()

    def _connect(self, inbox: str) -> Outbox:
        outbox = self._connect_to(inbox)
        if self._predecessor:
            # By this way, so that it comes before the same requests do.
            outbox.send(LeaveWorker(self._predecessor))
        if self._watcher:
            outbox.send(WatchEngine(self._watcher))
        return outbox

    def _lose(self, engine: int) -> None:
        outbox = self._outboxes.pop(engine, None)
        if outbox is None:
            return
        outbox.close(linger=0)
        self._retired.add(self._inboxes[engine])
        self._router.lose(engine)

    def _drain(self, news: EngineDraining) -> None:
        self._router.drain(news.engine)
        self._draining.add(news.engine)
        if news.is_bound:
            for request in self._journal:
                if self._router.engine_of(request.id) == news.engine:
                    request.engine = news.engine

    def _remove(self, engine: int) -> None:
        self._router.remove(engine)
        self._draining.discard(engine)
        for request in self._journal:
            if request.engine == engine:
                request.engine = None

    def _gain(self, engine: int, inbox: str) -> None:
        if self._inboxes.get(engine) == inbox and engine in self._outboxes:
            return
        self._lose(engine)
        self._inboxes[engine] = inbox
        self._outboxes[engine] = self._connect(inbox)
        self._router.gain(engine)

    def _watch(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            if output.id in self._suspects and output.progress is None:
                self._suspects[output.id] -= 1
                if output.finish_reason is not None or self._suspects[output.id] == 0:
                    self._clear([output.id])

    def _clear(self, ids: Iterable[str]) -> None:
        """Remove suspects, and send out the next one if the one on trial is cleared."""
        gone = [request_id for request_id in ids if self._suspects.pop(request_id, None) is not None]
        self._cleared += gone
        if self._trial in gone:
            self._trial = None
            for request in self._journal:
                if request.id in self._suspects and request.id not in self._router and self._place(request):
                    break

    def _place(self, request: AddRequest) -> bool:
        is_suspect = request.id in self._suspects
        if is_suspect and self._trial is not None:
            return False
        engine = self._router.route(request)
        if engine is None:
            return False
        if is_suspect:
            self._trial = request.id
        self._outboxes[engine].send(request)
        return True


class Journal:
    """Keeps each `AddRequest` from its acceptance to its end, in order of acceptance, with its output tokens.

    So any engine can continue any request: the death of an engine preempts all of its requests. A recomputed one draws
    the same tokens, since a draw is keyed by its seed and the position; they count as output for penalties, limits and
    grammars.
    """

    def __init__(self) -> None:
        self._open: dict[str, AddRequest] = {}

    def __iter__(self) -> Iterator[AddRequest]:
        return iter(list(self._open.values()))

    def accept(self, request: AddRequest) -> None:
        """Record an accepted request."""
        self._open[request.id] = request

    def record_outputs(self, outputs: Iterable[TokenOutput]) -> None:
        """Record the outputs of a step."""
        for output in outputs:
            request = self._open.get(output.id)
            if request is None:
                continue
            if output.finish_reason is not None:
                del self._open[output.id]
                continue
            if not request.output_token_ids and output.token_ids and request.params.prompt_logprobs is not None:
                # They are out with the first token; asked for again, they would cost the whole prompt.
                request.params = msgspec.structs.replace(request.params, prompt_logprobs=None)
            request.output_token_ids += output.token_ids

    def leave(self, ids: Iterable[str]) -> None:
        """Forget requests that are about to be aborted."""
        for request_id in ids:
            self._open.pop(request_id, None)
