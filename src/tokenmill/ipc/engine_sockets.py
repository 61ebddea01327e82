"""The sockets of an engine's process: one inbox, a way to the API process, and one to each text worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import zmq

from tokenmill.core.messages import StepOutputs, ToApi, ToEngine, ToReporter
from tokenmill.core.part_messages import EngineMessage, EngineReport, WatchEngine
from tokenmill.ipc.channels import API, LINGER_MILLISECONDS, Inbox, Outbox, engine_name
from tokenmill.ipc.heartbeat import Heartbeat
from tokenmill.ipc.interrupts import SignalBell


class EngineSockets:
    """The inbox and the outboxes of the process of engine `index`. `life`: how often it has been started again.

    Attributes:
        heed: called with each message that comes, unless it is None.
    """

    def __init__(self, folder: Path, index: int, life: int = 0) -> None:
        self.name = engine_name(index, life=life)
        self.folder = folder
        self._index = index
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[ToReporter] = Inbox(self._context, folder, self.name, ToReporter)
        self._api = Outbox(self._context, folder, API)
        self._workers: dict[str, Outbox] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._bell: SignalBell | None = None
        self.heed: Callable[[ToReporter], None] | None = None

    def listen_for_signals(self) -> None:
        """Let a signal end the wait of `receive`; for a process whose main thread calls it."""
        self._bell = SignalBell()
        self._poller.register(self._bell.fileno(), zmq.POLLIN)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        """Return all messages that are there; wait up to `wait_ms` for the first, or for a signal."""
        messages: list[ToEngine] = []
        if wait_ms:
            if not self._poller.poll(wait_ms):
                return messages
            if self._bell is not None:
                self._bell.silence()
        while (message := self._inbox.receive()) is not None:
            if self.heed is not None:
                self.heed(message)
            if not isinstance(message, WatchEngine):
                messages.append(message)
        return messages

    def send_to_api(self, message: ToApi) -> None:
        """Send a message to the API process, marked with the engine's index."""
        if isinstance(message, EngineMessage):
            message.engine = self._index
        self._api.send(message)

    def send_to_worker(self, worker: str, message: StepOutputs | EngineReport) -> None:
        """Send a text worker the outputs of a step for its requests, or a report of how the engine is.

        `worker`: the name of its inbox.
        """
        if worker not in self._workers:
            self._workers[worker] = Outbox(self._context, self.folder, worker)
        message.source = self.name
        if isinstance(message, EngineReport):
            message.engine = self._index
        self._workers[worker].send(message)

    def leave_worker(self, worker: str) -> None:
        """Drop what is on its way to a text worker that has died."""
        outbox = self._workers.pop(worker, None)
        if outbox is not None:
            outbox.close(linger=0)

    def heartbeat(self, timeout: float) -> Heartbeat:
        """Return the engine's heartbeat, a context manager."""
        return Heartbeat(self._context, self.folder, self._inbox, timeout)

    def close(self, linger: int = LINGER_MILLISECONDS) -> None:
        """Deliver what is on its way, for at most `linger` milliseconds, and let go."""
        self._context.destroy(linger=linger)
