"""The unix sockets between the processes of a server: one inbox each, in a private folder.

    api.ipc       read by the API process     <- text workers, engine
    engine.ipc    read by the engine          <- text workers
    worker-0.ipc  read by text worker 0       <- API process, engine

Messages are the msgspec structs of `messages.py` in msgpack, nothing else. A message sent before its reader is there
waits for it; none is dropped while both ends live. Does not know what the messages mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from tokenmill.config import EngineConfig, ServerConfig
from tokenmill.messages import Message

API = "api"
ENGINE = "engine"
LINGER_MILLISECONDS = 200

T = TypeVar("T")


def worker_name(index: int) -> str:
    """Name of a text worker's inbox."""
    return f"worker-{index}"


class LaunchFile(msgspec.Struct):
    """What a child process reads first: `launch.json` in the private folder."""

    engine: EngineConfig
    server: ServerConfig

    def write(self, folder: Path) -> None:
        """Write it for the children to read."""
        (folder / "launch.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> LaunchFile:
        """Read what the parent wrote."""
        return msgspec.json.decode((folder / "launch.json").read_bytes(), type=cls)


class Inbox(Generic[T]):
    """The reading end of a process. `kind` is the union of the messages it takes.

    Attributes:
        num_bytes: size of the message that came last.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, name: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.num_bytes = 0
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.bind(_address(folder, name))
        self._decoder = msgspec.msgpack.Decoder(kind)

    def receive(self) -> T | None:
        """The next message, or None when none is there now."""
        # ZeroMQ looks only every 100 messages whether other senders have begun; who asks for events makes it look.
        self.socket.get(zmq.EVENTS)
        try:
            raw = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.num_bytes = len(raw)
        message: T = self._decoder.decode(raw)
        return message

    def close(self) -> None:
        """Stop reading; what is unread is dropped."""
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

    def close(self) -> None:
        """Give what is queued a moment to leave, then close."""
        self._socket.close()


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}.ipc"
