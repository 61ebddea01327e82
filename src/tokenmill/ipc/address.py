"""Address of a process: a unix socket on this host, or a TCP port."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.errors import InvalidConfig

_UNIX, _TCP = "unix:", "tcp://"
_BACKLOG = 64


class Address(NamedTuple):
    """A host and its port, or a unix socket. Clients see the addresses of KV in `kv_transfer_params`.

    Attributes:
        host: name or number of the host, or `unix:PATH`.
        port: 0 for a unix socket.
    """

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `unix:PATH` or `tcp://HOST:PORT`.

        Raises:
            InvalidConfig: it is neither.
        """
        if text.startswith(_UNIX) and len(text) > len(_UNIX):
            return cls(text)
        host, _, port = text.removeprefix(_TCP).rpartition(":")
        if not (text.startswith(_TCP) and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise InvalidConfig(f"an address is unix:PATH or tcp://HOST:PORT, not {text!r}")
        return cls(host.strip("[]"), int(port))

    @property
    def is_unix(self) -> bool:
        """True for a unix socket."""
        return self.host.startswith(_UNIX)

    def __str__(self) -> str:
        return self.host if self.is_unix else f"{_TCP}{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Return a listening socket; only this user may connect to a unix socket.

        Raises:
            OSError: the address cannot be bound, or a process listens at that path already.
        """
        if not self.is_unix:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        path = self.host.removeprefix(_UNIX)
        _remove_dead(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def unlink(self) -> None:
        """Remove a unix socket after listening at it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.host.removeprefix(_UNIX))

    def connect(self, seconds: float) -> socket.socket:
        """Return a connection to the process that listens at this address.

        Raises:
            OSError: no process listens there, or it does not answer within `seconds`.
        """
        if not self.is_unix:
            connection = socket.create_connection((self.host, self.port), timeout=seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            connection.connect(self.host.removeprefix(_UNIX))
        except OSError:
            connection.close()
            raise
        return connection


def _remove_dead(path: str) -> None:
    """Remove the socket that a dead process has left; leave one that answers, so that binding fails."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
