"""uvicorn's HTTP protocol with a limit where it has none: on the head of a request, while it is still arriving."""

from __future__ import annotations

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenmill.errors import InvalidRequest, TokenMillError
from tokenmill.server.errors import HeadersTooLarge, error_body
from tokenmill.server.middleware import MAX_HEADER_BYTES

# The request line and what separates headers come on top of the headers that the middleware counts.
MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
# So much of a refused body is thrown away as it comes: to close at once would cost most clients the answer.
MAX_UNREAD_BYTES = 64 << 20


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The parser below collects a head of any size before it tells; this class does not let it."""

    _num_heads = 0
    _num_head_bytes = 0
    _is_in_head = True
    _num_unread = 0

    def data_received(self, data: bytes) -> None:
        """Parse what has come. Refuse a head that goes on after the limit; do not take in a body nobody reads."""
        num_heads, was_in_head = self._num_heads, self._is_in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_in_head:
            self._num_unread = self._num_unread + len(data) if self.cycle.response_complete else 0
            if self._num_unread > MAX_UNREAD_BYTES:
                self.transport.close()
        elif was_in_head and self._num_heads == num_heads:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """The head ends; what follows is the body."""
        self._is_in_head = False
        self._num_heads += 1
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request ends; what follows is another head."""
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of all errors."""
        self._refuse(InvalidRequest(msg))

    def _refuse(self, error: TokenMillError) -> None:
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
