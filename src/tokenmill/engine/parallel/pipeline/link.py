"""A connection between two stages: messages, and the hidden states behind them, over a unix socket or TCP.

Nothing travels before both ends have proved that they know the secret, where there is one; between hosts the network
must be trusted, for what follows is not encrypted. A thread reads all that comes, so that no stage waits for another to
read while that one waits for it, and so that an end that is gone is noticed at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from tokenmill.core.errors import EngineFailed
from tokenmill.engine.parallel.messages import RunPass
from tokenmill.ipc.secret import NONCE_BYTES, PROOF_BYTES, Secret, Side
from tokenmill.platform.host_arrays import host_array, library_of

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

_FRAME = struct.Struct("<QQ")  # bytes of the message, and of the hidden states behind it
_SEND_TIMEOUT = struct.Struct("ll")


class Hello(msgspec.Struct, tag=0, array_like=True):
    """A stage to the first one: its number, its model, and where the stage before it finds it."""

    stage: int
    model: str
    address: str


class Welcome(msgspec.Struct, tag=1, array_like=True):
    """The first stage to another: where the next one is; "" to the last."""

    next: str


class Pages(msgspec.Struct, tag=2, array_like=True):
    """A stage to the first one: the pages that it has room for. And back: the pages that there are."""

    count: int


class Pass(msgspec.Struct, tag=3, array_like=True):
    """To the next stage: run your layers; the hidden states of all tokens follow."""

    number: int
    run: RunPass


class Outputs(msgspec.Struct, tag=4, array_like=True):
    """The last stage to the first: a pass is through; the normed hidden states of its outputs follow."""

    number: int


class Bye(msgspec.Struct, tag=5, array_like=True):
    """To the next stage: the engine ends."""


class Join(msgspec.Struct, tag=6, array_like=True):
    """Another machine to the first one: it is ready to start its ranks."""

    node: int


class Launch(msgspec.Struct, tag=7, array_like=True):
    """The first machine to another: start your ranks.

    Attributes:
        timeout: seconds that they wait for each other.
    """

    model: str
    timeout: float


class Trouble(msgspec.Struct, tag=8, array_like=True):
    """To the first stage: why this one, or the ranks of this machine, have given up."""

    why: str


Message: TypeAlias = Hello | Welcome | Pages | Pass | Outputs | Bye | Join | Launch | Trouble


class Link:
    """One end of a connection to another stage."""

    def __init__(self, connection: socket.socket, name: str, timeout: float) -> None:
        """
        Args:
            connection: a socket whose ends have proved who they are.
            name: name of the other end, for errors.
            timeout: seconds within which the other end reads what is sent.
        """
        self.name = name
        self._socket = connection
        self._received: queue.SimpleQueue[tuple[Message, bytearray] | None] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._trouble = ""
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT.pack(max(1, int(timeout)), 0))
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that is gone without a word: its end is probed while nothing comes.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1000))
        threading.Thread(target=self._read, name=f"link to {name}", daemon=True).start()

    def send(self, message: Message, hidden: AnyArray | None = None) -> None:
        """Send a message and the numbers that belong to it.

        Raises:
            EngineFailed: the other end is gone, or does not read.
        """
        payload = self._encoder.encode(message)
        numbers = b"" if hidden is None else np.ascontiguousarray(host_array(hidden)).reshape(-1).view(np.uint8).data
        pieces = [_FRAME.pack(len(payload), len(numbers)) + payload, numbers]
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except BlockingIOError:
            raise EngineFailed(f"{self.name} did not read its messages in time") from None
        except OSError as error:
            raise EngineFailed(f"{self.name} is gone: {self._trouble or error.strerror}") from error

    def receive(self, timeout: float) -> tuple[Message, bytearray] | None:
        """Return the next message and the numbers that belong to it; None if none has come in time.

        Raises:
            EngineFailed: the other end is gone, or has given up.
        """
        try:
            received = self._received.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        if received is None:
            self._received.put(None)
            raise EngineFailed(f"{self.name} is gone: {self._trouble}")
        if isinstance(received[0], Trouble):
            raise EngineFailed(f"{self.name} has given up: {received[0].why}")
        return received

    @property
    def own_host(self) -> str:
        """Address of this end, by which the other end's host reaches this one."""
        return str(self._socket.getsockname()[0])

    def close(self, trouble: str = "") -> None:
        """End the connection; the other end hears of it. `trouble`: why, if it does not end well."""
        if trouble:
            with contextlib.suppress(EngineFailed):
                self.send(Trouble(trouble))
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(Message)
        try:
            while True:
                of_message, of_numbers = _FRAME.unpack(_read_exactly(self._socket, _FRAME.size))
                message = decoder.decode(_read_exactly(self._socket, of_message))
                self._received.put((message, _read_exactly(self._socket, of_numbers)))
        except (OSError, msgspec.MsgspecError) as error:
            self._trouble = str(error)
        self._received.put(None)


def hidden_states(numbers: bytearray, like: AnyArray, hidden_size: int) -> AnyArray:
    """Return the hidden states [rows, hidden_size] that came behind a message, in memory of their own.

    Args:
        like: an array of their library and dtype.
    """
    num_rows = len(numbers) // (hidden_size * like.itemsize)
    return library_of(like).over(np.frombuffer(numbers, np.uint8), like).reshape(num_rows, hidden_size)


def prove(connection: socket.socket, secret: Secret | None, is_listener: bool, seconds: float) -> None:
    """Check that both ends know the secret; see `ipc.secret`. A unix socket needs none: the system says who connects.

    Raises:
        OSError: the other end does not know it, or says nothing in time.
    """
    if secret is None:
        return
    own_side, other_side = _SIDES if is_listener else _SIDES[::-1]
    connection.settimeout(seconds)
    deadline, nonce = time.monotonic() + seconds, os.urandom(NONCE_BYTES)
    connection.sendall(nonce)
    theirs = bytes(_read_exactly(connection, NONCE_BYTES, deadline))
    nonces = (nonce, theirs) if is_listener else (theirs, nonce)
    if is_listener:  # the side that connects proves it first
        _check(connection, secret, other_side, nonces, deadline)
        connection.sendall(secret.prove(own_side, *nonces))
    else:
        connection.sendall(secret.prove(own_side, *nonces))
        _check(connection, secret, other_side, nonces, deadline)


_SIDES: tuple[Side, Side] = ("head", "stage")


def _check(connection: socket.socket, secret: Secret, side: Side, nonces: tuple[bytes, bytes], deadline: float) -> None:
    if not secret.is_proof(bytes(_read_exactly(connection, PROOF_BYTES, deadline)), side, *nonces):
        raise PermissionError("the other end does not know the secret")


def _read_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (moved := connection.recv_into(view[done:])):
            raise ConnectionResetError("the connection was closed")
        done += moved
    return data
