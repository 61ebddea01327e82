"""Extend uvicorn's HTTP protocol with limits on heads, silent clients and connections that have a request."""

from __future__ import annotations

import asyncio
import enum
import math
import socket
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from tokenmill.core.errors import InvalidRequest, TokenMillError
from tokenmill.serving.server.http.connections import Connections
from tokenmill.serving.server.http.errors import HeadersTooLarge, RequestTimedOut, error_body
from tokenmill.serving.server.http.middleware import MAX_HEADER_BYTES, NOTE_SURPLUS

# The request line and what separates headers come on top of the headers that the middleware counts.
MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
# So much of a refused body is thrown away as it comes: to close at once would cost most clients the answer.
MAX_UNREAD_BYTES = 64 << 20
# A body has its time in all, and a second more for each of these: who sends a large one is not who sends no end of one.
BODY_BYTES_PER_SECOND = 16 << 10
# Who has closed its side only may still read, and who has left has done the same: see `LimitedProtocol.eof_received`.
HALF_CLOSED_SECONDS = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Part(enum.Enum):
    """The part of a message that the next byte of a connection belongs to, or no message yet."""

    NONE = "none"
    HEAD = "head"
    BODY = "body"


class LimitedProtocol(HttpToolsProtocol):
    """One connection, with a limit on the size of its head, which the parser below would let grow.

    Attributes:
        due: see `Connection`.
        beginning: the task that makes the connection; a client can draw out its TLS handshake.
    """

    beginning: asyncio.Task[None]

    def __init__(self, config: uvicorn.Config, server_state: ServerState, connections: Connections) -> None:
        app_state: dict[str, Any] = {}
        super().__init__(config, server_state, app_state)
        self.due = math.inf
        self._connections = connections
        self._part = Part.NONE
        self._num_heads = 0
        self._num_head_bytes = 0
        self._num_unread = 0
        self._body_began = 0.0
        self._num_body_bytes = 0
        self._is_half_closed = False
        self._has_probed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._connections.expect_request(self, self._connections.limits.head)

    def connection_lost(self, error: Exception | None) -> None:
        """Free the connection's place."""
        super().connection_lost(error)
        self._connections.leave(self)

    def data_received(self, data: bytes) -> None:
        """Parse incoming bytes; refuse a head beyond the limit and the rest of a body that is not read."""
        num_heads, was_in_body = self._num_heads, self._part is Part.BODY
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._part is Part.BODY:
            self._count_body(len(data))
        elif not was_in_body and self._num_heads == num_heads:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Note that the client sends nothing more; return True to still answer what it has asked.

        A client that has left looks the same until something is sent to it: then its machine resets the connection.
        An answer does that; if it has not begun after a second, an interim reply does, which clients skip.
        """
        is_tls = self.transport.get_extra_info("sslcontext") is not None  # where one side cannot close alone
        if is_tls or not self._is_answering or self._part is Part.BODY:
            return False
        self._is_half_closed = True
        self.due = self._connections.now + HALF_CLOSED_SECONDS
        return True

    def on_message_begin(self) -> None:
        """Start the time limit of a head, unless the client still waits for an answer."""
        self._part = Part.HEAD
        if not self._is_answering:
            self._connections.expect_request(self, self._connections.limits.head)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Admit the request, or mark it as surplus, and begin to wait for its body."""
        self._part = Part.BODY
        self._num_heads += 1
        self._num_head_bytes = 0
        is_surplus = not self._connections.admit_request(self)
        if is_surplus:
            self.scope["state"][NOTE_SURPLUS] = self._connections.note_surplus
        super().on_headers_complete()
        if is_surplus:
            self.cycle.keep_alive = False
        self._begin_body()

    def on_message_complete(self) -> None:
        """Note the end of the request; the next head follows once this one is answered."""
        self._part = Part.NONE
        super().on_message_complete()
        if self._is_answering:
            self.due = math.inf
        else:  # refused before it had come; uvicorn forgets the time that it gave an idle connection
            self._connections.expect_request(self, self._connections.limits.idle)

    def on_response_complete(self) -> None:
        """Begin to wait for the client's next bytes, or close if it sends nothing more."""
        super().on_response_complete()
        if self._is_answering:  # another request came meanwhile
            return
        if self._is_half_closed:
            self.transport.close()
        else:
            limits = self._connections.limits
            seconds = {Part.NONE: limits.idle, Part.HEAD: limits.head, Part.BODY: limits.body}[self._part]
            self._connections.expect_request(self, seconds)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, in the form of all errors."""
        self._refuse(InvalidRequest(msg))

    def time_out(self) -> None:
        """Close a silent client, unless it is still reading an answer or was told to pause."""
        if self.transport is None:
            self.beginning.cancel()
        elif self._is_half_closed:
            self._look_for_client()
        elif self.flow.read_paused or self.transport.get_write_buffer_size():
            self._begin_body()
        elif self._part is Part.NONE or self.transport.is_closing() or self._is_answered:
            self.transport.abort()
        else:
            limits, part = self._connections.limits, self._part
            seconds = limits.head if part is Part.HEAD else limits.body
            self._refuse(RequestTimedOut(f"the rest of the request's {part.value} did not come within {seconds:g} s"))

    def give_way(self) -> None:
        """Abort the connection at once."""
        if self.transport is None:
            self.beginning.cancel()
        else:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered(self) -> bool:
        """True if the answer has begun while the request's body is still coming."""
        return self._part is Part.BODY and self.cycle.response_started

    def _count_body(self, num_bytes: int) -> None:
        """Count bytes of a body; close if too many follow after the answer is complete."""
        if not self.cycle.response_complete:
            self._num_body_bytes += num_bytes
            self._wait_for_body()
            self._num_unread = 0
            return
        self._num_unread += num_bytes
        if self._num_unread > MAX_UNREAD_BYTES:
            self.transport.close()

    def _begin_body(self) -> None:
        """Restart the client's time for the body."""
        self._body_began, self._num_body_bytes = self._connections.now, 0
        self._wait_for_body()

    def _wait_for_body(self) -> None:
        """Limit the time for the next part of the body, and for all of it."""
        silent_since = self._connections.now
        earned = self._body_began + self._num_body_bytes / BODY_BYTES_PER_SECOND
        self.due = min(silent_since, earned) + self._connections.limits.body

    def _look_for_client(self) -> None:
        """Close if the client has left; see `eof_received`."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        has_begun = bool(self.pipeline) or self.cycle.response_started
        if not (has_begun or self._has_probed or self.cycle.scope["http_version"] == "1.0"):
            self._has_probed = True
            self.transport.write(CONTINUE)
        self.due = self._connections.now  # with the next sweep

    def _refuse(self, error: TokenMillError) -> None:
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
