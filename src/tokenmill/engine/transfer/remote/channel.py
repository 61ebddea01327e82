"""One connection: messages within bounds, raw pages between them, and a deadline on everything."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from tokenmill.engine.transfer.remote.messages import LARGEST_MESSAGE

_LENGTH_BYTES = 4
# Pieces of memory that one system call takes; the kernel's limit is 1,024.
_MOST_PIECES = 512

Incoming = TypeVar("Incoming")


class TransferError(Exception):
    """The expected message or pages do not come, and the connection is of no use any more. Its text is a sentence."""


class PagesRefused(TransferError):
    """The producer does not give these pages; it may give others over the same connection."""


class Channel(Generic[Incoming]):
    """Sends any message, and receives messages of one type. Used by one thread at a time."""

    def __init__(self, connection: socket.socket, incoming: object) -> None:
        """`incoming`: the type of the other side's messages, a union of structs."""
        self.socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)

    def send(self, message: msgspec.Struct, deadline: float, pieces: Sequence[memoryview] = ()) -> None:
        """Send a message and the bytes that follow it.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TransferError: the other side is gone, or does not read.
        """
        payload = self._encoder.encode(message)
        assert len(payload) <= LARGEST_MESSAGE, f"a message of {len(payload)} bytes"
        head = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        self._each(self.socket.sendmsg, [memoryview(head), *pieces], deadline)

    def receive(self, deadline: float) -> Incoming:
        """Return the next message.

        Raises:
            TransferError: none came before the deadline, or it cannot be decoded.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "big")
        if length > LARGEST_MESSAGE:
            raise TransferError(f"a message of {length} bytes was announced; at most {LARGEST_MESSAGE} are allowed")
        try:
            return self._decoder.decode(self._read(length, deadline))
        except msgspec.MsgspecError as error:
            raise TransferError(f"received something other than a message of this protocol: {error}") from error

    def receive_into(self, pieces: Sequence[memoryview], deadline: float) -> None:
        """Fill pieces of memory, in order, with the bytes that come.

        Raises:
            TransferError: they do not come before the deadline.
        """
        self._each(lambda views: self.socket.recvmsg_into(views)[0], list(pieces), deadline)

    def close(self) -> None:
        """End the connection; an error wakes a thread that waits in it."""
        with contextlib.suppress(OSError):  # the other side was quicker
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        self.receive_into([memoryview(data)], deadline)
        return data

    def _each(self, call: Callable[[list[memoryview]], int], views: list[memoryview], deadline: float) -> None:
        """Let a system call go through all views, even if it moves few bytes at a time."""
        start = 0
        while start < len(views):
            if not views[start]:
                start += 1
                continue
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                moved = call(views[start : start + _MOST_PIECES])
            except TimeoutError:
                raise TransferError("the other side did not respond in time") from None
            except OSError as error:
                raise TransferError(f"the connection broke: {error.strerror or error}") from error
            if not moved:
                raise TransferError("the other side closed the connection")
            while start < len(views) and moved >= len(views[start]):
                moved -= len(views[start])
                start += 1
            if moved:
                views[start] = views[start][moved:]
