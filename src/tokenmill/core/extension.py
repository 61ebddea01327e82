"""`EngineExtension`: a capability's part in the loop of an engine. Hooks do nothing unless a subclass overrides them.

    a request comes    arrived
    each iteration          poll ─> before_schedule ─> schedule, launch, commit ─> committed ─> released
    nothing can run    wait, where one `has_waiting`
    from outside       answer, before_abort, before_reset, forget_stored, before_sleep, sleep

The engine calls all of them in its own thread, the extensions in their order. Knows neither engine nor scheduler.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from tokenmill.core.engine_messages import EngineReply
from tokenmill.core.messages import AddRequest, EngineControl, TokenOutput
from tokenmill.core.request import Request, RequestStatus
from tokenmill.core.transfers import TransferEvent


class Host(Protocol):
    """The engine, as its extensions see it."""

    @property
    def requests(self) -> Mapping[str, Request]:
        """All live requests, by id."""

    def wake(self, request_id: str) -> None:
        """Let a request go on that waited for an event; ignore unknown ids."""

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests; return the terminal output of each that was alive."""

    def apply_transfer_events(self, events: Iterable[TransferEvent]) -> None:
        """Apply events from sources of KV."""


class EngineExtension:
    """A part of the engine's loop beside scheduler and executor."""

    @property
    def has_waiting(self) -> bool:
        """True while a request may wait for an event that `wait` waits for."""
        return False

    def arrived(self, message: AddRequest) -> RequestStatus | None:
        """Take in a new request. Return the status in which it has to wait until the host wakes it; None: it need not.

        Raises:
            InvalidRequest: it cannot be served; `released` follows.
        """
        return None

    def poll(self, engine: Host) -> Sequence[TokenOutput]:
        """Tell the engine of events since the last iteration; return the outputs of requests that these have ended."""
        return ()

    def before_schedule(self, engine: Host) -> None:
        """Act on the queues as the next step finds them."""

    def committed(self, outputs: Sequence[TokenOutput]) -> None:
        """Take in, and perhaps complete, the outputs that a step has brought."""

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        """Let go of requests that have ended. Called each iteration: launched steps may still use those of `alive`."""

    def wait(self, timeout: float) -> None:
        """Wait for an event that the next `poll` tells of, for at most `timeout` seconds."""

    def before_abort(self, engine: Host, ids: Sequence[str]) -> None:
        """Stop all work for requests that are about to end."""

    def before_reset(self, engine: Host, preempt_running: bool) -> None:
        """Let go of cached prefixes that are about to be forgotten; see `Engine.reset_prefix_cache`."""

    def forget_stored(self) -> None:
        """Forget the prefixes that are stored outside the engine."""

    def before_sleep(self, engine: Host) -> None:
        """Store elsewhere what is about to be forgotten."""

    def sleep(self) -> None:
        """Give memory back to the machine until it is used again; no request is alive, and no prefix is cached."""

    def answer(self, message: EngineControl) -> EngineReply | None:
        """Carry out an operator's message and return the reply; None: it is for another."""
        return None

    def close(self) -> None:
        """Release everything: the engine ends."""
