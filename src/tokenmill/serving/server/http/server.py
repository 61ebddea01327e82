"""Start and stop HTTP as a whole: uvicorn, the acceptor before it, and the watch over its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.server.http.acceptor import Acceptor
from tokenmill.serving.server.http.connections import Connections, SilenceLimits
from tokenmill.serving.server.http.descriptors import num_connections
from tokenmill.serving.server.http.listener import explain
from tokenmill.serving.server.http.protocol import LimitedProtocol

BACKLOG = 2048
# What streams get to send their last event after they have been told to end.
_LAST_EVENT_SECONDS = 0.3
# How old the date of a reply may be.
_DATE_SECONDS = 1.0


class HttpServer:
    """Serves an application on a socket in the current event loop, until it is told to stop."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, listener: socket.socket, tell: Callable[[str], None]
    ) -> None:
        """Prepare to serve on `listener`, which is bound; `tell` gets lines for the log."""
        self._config = config
        self._listener = listener
        self._connections = Connections(SilenceLimits.from_config(config), num_connections(), tell)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=math.ceil(config.keep_alive_timeout),
                timeout_graceful_shutdown=3600,  # the caller that stops the server keeps the time
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            ),
            self._connections.occupied,
        )
        self._watch: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None

    async def start(self) -> asyncio.Task[None]:
        """Accept requests; return a task that ends when the server does.

        Raises:
            InvalidConfig: another process listens there by now.
        """
        # Listening here, and not in uvicorn, lets a port that was taken meanwhile be told from other errors.
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise explain(error, self._config) from error
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.005)
        tls = self._uvicorn.config.ssl
        self._acceptor = Acceptor(self._listener, self._make_protocol, self._connections, tls)
        self._watch = asyncio.ensure_future(self._connections.watch())
        serving.add_done_callback(lambda _: self._end())
        return serving

    def stop(self) -> None:
        """Accept no new connections; the task ends after all replies."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._uvicorn.stop()

    def abandon(self) -> None:
        """Drop the connections that are still open; their clients do not read."""
        # uvicorn would show a traceback for each.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._uvicorn.force_exit = True

    def _make_protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self._uvicorn.config, self._uvicorn.server_state, self._connections)

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers and without a pulse of its own; the supervisor decides when to end."""

    def __init__(self, config: uvicorn.Config, occupied: asyncio.Event) -> None:
        """`occupied` is set while there are connections."""
        super().__init__(config)
        self._occupied = occupied
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let `main_loop` end."""
        self.should_exit = True
        self._stopping.set()
        self._occupied.set()

    async def main_loop(self) -> None:
        """Keep the date of replies right while there are connections, until the server is told to stop."""
        while not await self.on_tick(0):
            if self._occupied.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _DATE_SECONDS)
            if not self._stopping.is_set():
                await self._occupied.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def wind_up(
    servers: Sequence[tuple[HttpServer, asyncio.Task[None]]],
    elsewhere: Callable[[], Sequence[asyncio.Future[None]]],
    patience: float,
    end_streams: Callable[[], None],
) -> None:
    """Accept nothing new; give open replies their time to end, then an error, then drop them.

    Args:
        servers: each with the task that `start` has returned.
        elsewhere: returns what must end beside the replies; called when no new requests come.
        patience: seconds.
        end_streams: ends the streams that are still open with an error.
    """
    for http, _ in servers:
        http.stop()
    ends = [serving for _, serving in servers]
    await asyncio.wait([*ends, *elsewhere()], timeout=patience)
    end_streams()
    await asyncio.wait(ends, timeout=_LAST_EVENT_SECONDS)
    for http, _ in servers:
        http.abandon()
    await asyncio.wait(ends, timeout=_LAST_EVENT_SECONDS)
    for serving in ends:
        serving.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
