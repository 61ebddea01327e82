"""Gates: events that requests may have to wait for besides their turn.

    a request arrives -> `admit` at every gate: ready, later, or refused
    once a step       -> `collect` at every gate: requests that are ready or refused
    it has gone       -> `release` at every gate

All gates of an engine are one extension of its loop, which does not know what is behind them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from tokenmill.core.errors import InvalidRequest, Refusal
from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.request import RequestStatus


class Gate(Protocol):
    """A condition that requests may have to wait for. The engine's thread calls it, between two steps.

    Attributes:
        status: the status in which requests wait here; one of `WAITING_FOR_EVENT`.
    """

    status: RequestStatus

    def admit(self, message: AddRequest) -> bool:
        """Take in a new request. Return True if it need not wait here, False if `collect` will tell.

        Raises:
            InvalidRequest: the request's need can never be met.
        """

    def collect(self, timeout: float) -> Mapping[str, Refusal | None]:
        """Return the requests that need not wait here any longer, each once: None, or why it is refused.

        Args:
            timeout: seconds to wait for the first of them.
        """

    def release(self, request_id: str) -> None:
        """Forget a request that has gone and that no launched step uses. Called once for each that `admit` took."""

    def close(self) -> None:
        """Let go of what the gate holds: the engine ends."""


class Gates(EngineExtension):
    """All gates of an engine, and the requests that wait at each.

    A request that waits at several waits in the status of the first of them.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = tuple(gates)
        self._admitted: set[str] = set()
        self._waiting: dict[str, list[Gate]] = {}
        self._passed: list[tuple[str, RequestStatus | Refusal]] = []  # while the engine waited
        self._leaving: dict[str, None] = {}  # in order, unlike a set

    @property
    def has_waiting(self) -> bool:
        """True while a request waits at a gate."""
        return bool(self._waiting)

    def arrived(self, message: AddRequest) -> RequestStatus | None:
        """Pass a new request to every gate; return the status in which it waits, or None.

        Raises:
            InvalidRequest: a gate refuses it; the other gates have forgotten it.
        """
        closed = []
        for number, gate in enumerate(self._gates):
            try:
                if not gate.admit(message):
                    closed.append(gate)
            except InvalidRequest:
                for earlier in self._gates[:number]:
                    earlier.release(message.id)
                raise
        self._admitted.add(message.id)
        if not closed:
            return None
        self._waiting[message.id] = closed
        return closed[0].status

    def poll(self, engine: Host) -> list[TokenOutput]:
        """Let requests go on whose gates have opened; return the terminal outputs of refused ones."""
        outputs = []
        passed, self._passed = self._passed, []
        for request_id, news in passed + self._collect(0.0):
            if isinstance(news, Refusal):
                engine.abort([request_id])
                outputs.append(TokenOutput.refusal(request_id, news))
            elif news is RequestStatus.WAITING:
                engine.wake(request_id)
            else:
                engine.requests[request_id].move_to(news)
        return outputs

    def wait(self, timeout: float) -> None:
        """Wait at the gate where the first request waits."""
        self._passed += self._collect(timeout)

    def _collect(self, timeout: float) -> list[tuple[str, RequestStatus | Refusal]]:
        """Return the requests that have passed a gate: the status in which each waits now, or why it is refused.

        Args:
            timeout: seconds to wait, at the gate where the first of them waits.
        """
        news: list[tuple[str, RequestStatus | Refusal]] = []
        if not self._waiting:
            return news
        first = next(iter(self._waiting.values()))[0]
        for gate in self._gates:
            for request_id, refusal in gate.collect(timeout if gate is first else 0.0).items():
                closed = self._waiting.get(request_id, [])
                if not closed:
                    continue  # another gate has just refused it
                closed.remove(gate)
                if refusal is not None or not closed:
                    del self._waiting[request_id]
                news.append((request_id, refusal or (closed[0].status if closed else RequestStatus.WAITING)))
        return news

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        """Let go of requests that have ended, once they are gone; ignore unknown ones.

        Args:
            alive: requests whose rows or pages are in use: a launched step may also use what a gate has given them.
        """
        for request_id in ended:
            if request_id in self._admitted:
                self._leaving[request_id] = None
        if self._leaving:
            for request_id in [request_id for request_id in self._leaving if request_id not in alive]:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._leaving[request_id]
        self._admitted.remove(request_id)
        self._waiting.pop(request_id, None)
        self._passed = [one for one in self._passed if one[0] != request_id]
        for gate in self._gates:
            gate.release(request_id)

    def close(self) -> None:
        """Close every gate: the engine ends."""
        for gate in self._gates:
            gate.close()
