"""Reads an inbox on the event loop: every message is handed on in the callback that finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

from tokenmill.ipc.channels import Inbox

_AT_ONCE = 256

T = TypeVar("T")


class InboxReader(Generic[T]):
    """Calls `handle` for each message, in order, from `start` to `stop`."""

    def __init__(self, inbox: Inbox[T], handle: Callable[[T], None]) -> None:
        self._inbox = inbox
        self._handle = handle
        self._fd = int(inbox.socket.get(zmq.FD))
        self._running = False

    def start(self) -> None:
        """Begin, on the running loop."""
        self._running = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)

    def stop(self) -> None:
        """Read no more."""
        self._running = False
        asyncio.get_running_loop().remove_reader(self._fd)

    def _drain(self) -> None:
        # ZeroMQ's descriptor tells of the first message only, so each callback must read to the end; after a while it
        # lets other callbacks run first.
        drained = False
        try:
            for _ in range(_AT_ONCE):
                message = self._inbox.receive() if self._running else None
                if message is None:
                    drained = True
                    return
                self._handle(message)
        finally:
            if not drained:
                asyncio.get_running_loop().call_soon(self._drain)
