"""Choose the engine of each request, for a text worker, which has the prompt's tokens and sees the request's end.

Each text worker has a router of its own. Engines report what it cannot see: other workers' requests and the caches. It
counts for itself what no report can have counted yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.part_messages import EngineReport
from tokenmill.serving.replicas.routing.engine_load import EngineLoad
from tokenmill.serving.replicas.routing.policies import Candidate, RoutingPolicy
from tokenmill.serving.replicas.routing.prefix_index import PrefixIndex

# Whose sessions are remembered; of others, the cache knows where they were.
MAX_SESSIONS = 10_000


class Router:
    """Remembers the engine of each request and of each session.

    Attributes:
        policy: chooses the engine of a request that is bound to none.
    """

    def __init__(self, engines: Sequence[int], policy: RoutingPolicy) -> None:
        """`engines`: the indices of the engines."""
        self.policy = policy
        self._loads = {engine: EngineLoad() for engine in engines}
        self._index: PrefixIndex | None = None
        self._engine_of: dict[str, int] = {}
        self._early: dict[str, list[int]] = {}  # the pages of requests without a token
        self._engine_of_session: dict[str, int] = {}
        self._draining: set[int] = set()

    def __contains__(self, request_id: str) -> bool:
        """Return True if an engine has this request."""
        return request_id in self._engine_of

    def begin_routing(self, page_size: int, fingerprint: str) -> None:
        """Begin to track caches and queues, once the engines are ready; see `PrefixIndex`."""
        self._index = PrefixIndex(page_size, fingerprint)

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine that has this request, or None."""
        return self._engine_of.get(request_id)

    def drain(self, engine: int) -> None:
        """Give an engine only the requests that ask for it."""
        self._draining.add(engine)
        self._forget_sessions(engine)

    def remove(self, engine: int) -> None:
        """Forget that a lost engine was draining: it will not come back, and another may get its index."""
        self._draining.discard(engine)

    def lose(self, engine: int) -> None:
        """Forget the requests and sessions of an engine that has died, and give it no more."""
        self._loads.pop(engine, None)
        self._early = {one: names for one, names in self._early.items() if self._engine_of[one] != engine}
        self._engine_of = {request: its for request, its in self._engine_of.items() if its != engine}
        self._forget_sessions(engine)
        if self._index is not None:
            self._index.lose(engine)

    def gain(self, engine: int) -> None:
        """Give an engine requests again."""
        self._loads.setdefault(engine, EngineLoad())

    def route(self, request: AddRequest) -> int | None:
        """Choose the engine of a request and count the request there; None: it must wait."""
        takers = (
            self._loads.keys() - self._draining if request.engine is None else self._loads.keys() & {request.engine}
        )
        if not takers:
            return None
        names = [] if self._index is None else self._index.names_of(request)
        engine, num_missing_tokens = self.choose(request, names)
        self._send(engine, request, names, num_missing_tokens)
        return engine

    def choose(self, request: AddRequest, names: Sequence[int]) -> tuple[int, int]:
        """Return the engine for a request with pages of these names, and how many of its tokens the engine lacks.

        The choice is the engine that the request asks for, else the engine of its session, else the policy's choice.
        """
        pinned = self._engine_of_session.get(request.session) if request.engine is None else request.engine
        candidates = {
            engine: self._candidate(load, request, names, engine)
            for engine, load in self._loads.items()
            if pinned == engine or (pinned is None and engine not in self._draining)
        }
        engine = self.policy.choose(candidates) if pinned is None else pinned
        return engine, candidates[engine].num_missing_tokens

    def apply_report(self, report: EngineReport) -> None:
        """Take in an engine's report."""
        load = self._loads.get(report.engine)
        if load is not None:
            load.apply_report(report)
            if self._index is not None:
                self._index.change(report.engine, report.changes, report.is_first)

    def ended(self, outputs: Iterable[TokenOutput]) -> None:
        """Take in an engine's outputs: first tokens, and the ends of requests."""
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.id)
            elif output.id in self._early and output.progress is None:
                self._settle(output.id)

    def leave(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget requests that are about to be aborted; return those that were in flight, by engine."""
        left: dict[int, list[str]] = {}
        for request_id in ids:
            engine = self._forget(request_id)
            if engine is not None:
                left.setdefault(engine, []).append(request_id)
        return left

    def _forget_sessions(self, engine: int) -> None:
        self._engine_of_session = {one: its for one, its in self._engine_of_session.items() if its != engine}

    def _candidate(self, load: EngineLoad, request: AddRequest, names: Sequence[int], engine: int) -> Candidate:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_cached = 0 if self._index is None else self._index.num_cached_tokens(engine, names)
        # Of a prompt that is all there, the last token is run all the same.
        return Candidate(load.num_requests, load.num_queued_tokens, max(1, num_tokens - num_cached))

    def _send(self, engine: int, request: AddRequest, names: list[int], num_missing_tokens: int) -> None:
        self._engine_of[request.id] = engine
        self._loads[engine].num_open += 1
        if self._index is not None:
            request.num_missing_tokens = num_missing_tokens
            self._early[request.id] = names
            self._loads[engine].expect(request.id, num_missing_tokens)
            self._index.expect(engine, names)
        if request.session:
            # To the end of the line: the one that was not used for longest is forgotten first.
            self._engine_of_session.pop(request.session, None)
            self._engine_of_session[request.session] = engine
            if len(self._engine_of_session) > MAX_SESSIONS:
                del self._engine_of_session[next(iter(self._engine_of_session))]

    def _settle(self, request_id: str) -> None:
        """Stop expecting a request's pages: its first token has come or will never come, and the pages are reported."""
        names, engine = self._early.pop(request_id), self._engine_of[request_id]
        self._loads[engine].settle(request_id)
        if self._index is not None:
            self._index.expect_no_more(engine, names)

    def _forget(self, request_id: str) -> int | None:
        if request_id in self._early:
            self._settle(request_id)
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            self._loads[engine].num_open -= 1
        return engine
