"""Which engine gets a request: asked by a text worker, which has the tokens of the prompt and sees the request's end.

Pure bookkeeping: no clock, no sockets. Each text worker has a router of its own and counts only its own requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tokenmill.core.messages import AddRequest, TokenOutput


class RoutingPolicy(Protocol):
    """Chooses among engines."""

    def choose(self, request: AddRequest, num_open: Mapping[int, int]) -> int:
        """The engine for a request. `num_open`: requests in flight, by the index of the engine."""
        ...


class FewestInFlight:
    """The engine with the fewest requests in flight; among equals each in turn."""

    def __init__(self, last: int = -1) -> None:
        """`last`: the turn comes to the engine after this one."""
        self._last = last

    def choose(self, request: AddRequest, num_open: Mapping[int, int]) -> int:
        """See `RoutingPolicy`."""
        self._last = min(num_open, key=lambda engine: (num_open[engine], engine <= self._last, engine))
        return self._last


class Router:
    """Remembers which engine has which request."""

    def __init__(self, engines: Sequence[int], policy: RoutingPolicy) -> None:
        """`engines`: their indices."""
        self._policy = policy
        self._num_open = dict.fromkeys(engines, 0)
        self._engine_of: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        """An engine has this request."""
        return request_id in self._engine_of

    def lose(self, engine: int) -> None:
        """An engine has died: it has no request any more, and gets none."""
        self._num_open.pop(engine, None)
        self._engine_of = {request: its for request, its in self._engine_of.items() if its != engine}

    def gain(self, engine: int) -> None:
        """An engine takes requests again."""
        self._num_open.setdefault(engine, 0)

    def route(self, request: AddRequest) -> int | None:
        """The engine that a request goes to: the one that it asks for, or the policy's choice; None: it must wait."""
        if not self._num_open or (request.engine is not None and request.engine not in self._num_open):
            return None
        engine = self._policy.choose(request, self._num_open) if request.engine is None else request.engine
        self._engine_of[request.id] = engine
        self._num_open[engine] += 1
        return engine

    def ended(self, outputs: Iterable[TokenOutput]) -> None:
        """Take in what an engine says of requests: those that have ended are in flight no more."""
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.id)

    def leave(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget requests that are about to be aborted; those that were in flight, by engine."""
        left: dict[int, list[str]] = {}
        for request_id in ids:
            engine = self._forget(request_id)
            if engine is not None:
                left.setdefault(engine, []).append(request_id)
        return left

    def _forget(self, request_id: str) -> int | None:
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            self._num_open[engine] -= 1
        return engine
