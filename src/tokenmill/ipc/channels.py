"""The unix sockets between the processes of a server: one inbox each, in a private folder.

    api.ipc       read by the API process     <- text workers, engines
    api-1.ipc     read by its API worker, if any <- text workers of its own, the API process
    engine-0.ipc  read by engine 0            <- text workers, API process
    worker-0.ipc  read by text worker 0       <- API process, engines

Messages are the msgspec structs of `messages.py` in msgpack, nothing else. A message sent before its reader is there
waits for it; none is dropped while both ends live, except what cannot be decoded. Does not know what the messages mean.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tokenmill.core.part_messages import Message

API = "api"
LINGER_MILLISECONDS = 200
# Why a part cannot start is told to a process that may itself be starting.
LAST_WORD_MILLISECONDS = 10_000

_logger = logging.getLogger(__name__)

T = TypeVar("T")


def api_name(index: int) -> str:
    """Return the name of an API process's inbox; the successor of one that has died takes it over."""
    return f"{API}-{index}" if index else API


def engine_name(index: int, rank: int = 0, life: int = 0) -> str:
    """Return the name of the inbox of an engine, or of another rank of it. `life`: how often it was started again."""
    return (f"engine-{index}-rank-{rank}" if rank else f"engine-{index}") + _suffix(life)


def worker_name(index: int, life: int = 0) -> str:
    """Return the name of a text worker's inbox. `life`: how often it was started again."""
    return f"worker-{index}" + _suffix(life)


def _suffix(life: int) -> str:
    return f"-life-{life}" if life else ""


class Inbox(Generic[T]):
    """The reading end of a process. `kind` is the union of the messages it takes.

    Attributes:
        num_bytes: size of the last message.
        num_dropped: messages that could not be read, or came when they made no sense.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, name: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.name = name
        self.num_bytes = 0
        self.num_dropped = 0
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.bind(_address(folder, name))
        self._decoder = msgspec.msgpack.Decoder(kind)

    def receive(self) -> T | None:
        """Return the next message, or None if there is none now. Drop, count and log what cannot be decoded."""
        # ZeroMQ looks only every 100 messages whether other senders have begun; who asks for events makes it look.
        self.socket.get(zmq.EVENTS)
        while True:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self.num_bytes = len(raw)
            # Bytes can be wrong in more ways than msgspec has errors for: too deep, no UTF-8.
            try:
                message: T = self._decoder.decode(raw)
                return message
            except Exception as error:
                self.drop(repr(error))

    def drop(self, reason: str) -> None:
        """Count and log that the last message is left out."""
        self.num_dropped += 1
        _logger.warning("a message of %d bytes to %s is dropped: %s", self.num_bytes, self.name, reason)

    def close(self) -> None:
        """Stop reading, and drop what is unread."""
        self.socket.close(linger=0)


class Outbox:
    """A writing end to another process's inbox. `send` never blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, name: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.connect(_address(folder, name))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        """Queue a message; order is kept."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, linger: int | None = None) -> None:
        """Give queued messages a moment to leave, then close. `linger`: milliseconds, if not the default."""
        self._socket.close(linger)


def socket_path(folder: Path, name: str) -> Path:
    """Return the path of an inbox's socket."""
    return folder / f"{name}.ipc"


def http_path(folder: Path) -> Path:
    """Return the path of the socket where the first API process serves its API workers by HTTP."""
    return folder / "http.sock"


def _address(folder: Path, name: str) -> str:
    return f"ipc://{socket_path(folder, name)}"
