"""HTTP as an attacker writes it: bytes on a socket, with nothing normalized on the way."""

import contextlib
import socket
from urllib.parse import urlsplit

from tests.eventually import patience

# Far more than any answer takes, and far less than a server waits for ever.
SECONDS = patience(10.0)


def exchange(url: str, request: bytes, seconds: float = SECONDS) -> bytes:
    """Send bytes and read until the server closes; what it sent before it cut the connection counts too."""
    with connect(url, seconds) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        return read_all(connection)


def connect(url: str, seconds: float = SECONDS) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), timeout=seconds)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def status(reply: bytes) -> int:
    assert reply.startswith(b"HTTP/1.1 "), reply[:100]
    return int(reply[9:12])


def ask(url: str, method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    if not any(header.lower().startswith("host:") for header in headers):
        headers = ("Host: x", *headers)
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return exchange(url, "\r\n".join([*lines, "", ""]).encode("latin-1") + body)
