"""Accept connections from the listening socket, a few at a time, so that each is looked at before the next ones come.

uvicorn could listen itself, but then a connection would not count before its TLS handshake is over, and where no
descriptor is left, libuv closes what comes without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from tokenmill.serving.server.http.connections import Connections
from tokenmill.serving.server.http.protocol import LimitedProtocol
from tokenmill.serving.server.http.shared_listener import BEAT_SECONDS, SharedListener

# A connection that has sent its request should be read before it could have to give way to those that follow it.
AT_ONCE = 16
NOBODY_CAME = frozenset({errno.EAGAIN, errno.EINTR, errno.ECONNABORTED})
# Descriptors or memory have run out: to try again at once would only burn the processor.
PAUSE_SECONDS = 1.0
# So long another process is left to take a connection, looked at again and again, before this one does it.
STEP_BACK_SECONDS, MOST_STEPS_BACK = 0.002, 500


class Acceptor:
    """Accepts connections in the event loop that made it, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], LimitedProtocol],
        connections: Connections,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Start accepting from `listener`, which listens already; each connection gets a protocol of its own."""
        listener.settimeout(0)
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._tls = tls
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._shared = listener if isinstance(listener, SharedListener) else None
        self._num_steps_back = 0
        self._loop.add_reader(listener.fileno(), self._accept)
        if self._shared is not None:
            connections.show = self._shared.note
            self._show(self._shared)

    def close(self) -> None:
        """Accept no more connections, and end those that are still being made."""
        for timer in (self._pause, self._beat):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        # The parent of this process holds the socket too: closed here alone, it would let clients wait for ever.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for task in self._beginning:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._shared is not None and self._steps_back(self._shared):
                self._rest(STEP_BACK_SECONDS)
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in NOBODY_CAME:
                    return
                self._connections.note_refused(f"a connection cannot be accepted: {error.strerror}")
                self._rest(PAUSE_SECONDS)
                return
            self._begin(connection)

    def _rest(self, seconds: float) -> None:
        """Pause accepting for some seconds."""
        descriptor = self._listener.fileno()
        self._loop.remove_reader(descriptor)
        self._pause = self._loop.call_later(seconds, self._loop.add_reader, descriptor, self._accept)

    def _steps_back(self, shared: SharedListener) -> bool:
        """Return True to leave the next connection to a process that has fewer; give up when that one is too slow."""
        if not shared.is_ahead():
            self._num_steps_back = 0
            return False
        self._num_steps_back += 1
        return self._num_steps_back <= MOST_STEPS_BACK

    def _show(self, shared: SharedListener) -> None:
        """Show the other processes at intervals that this one is awake."""
        shared.note(len(self._connections))
        self._beat = self._loop.call_later(BEAT_SECONDS, self._show, shared)

    def _begin(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        protocol = self._make_protocol()
        task = self._loop.create_task(self._connect(connection, protocol))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        protocol.beginning = task
        self._connections.enter(protocol)

    async def _connect(self, connection: socket.socket, protocol: LimitedProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except BaseException:
            self._connections.leave(protocol)
            with contextlib.suppress(OSError):  # no TLS, or gone again
                raise
