"""Serve one application in this process until Ctrl-C, without engine processes: a proxy, or an encoder server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from starlette.types import ASGIApp

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.server.http.descriptors import raise_limit
from tokenmill.serving.server.http.listener import bind, check_tls, is_on_loopback
from tokenmill.serving.server.http.server import HttpServer, wind_up

_logger = logging.getLogger(__name__)


def prepare(config: ServerConfig) -> None:
    """Set up logs and limits of the process, and check what can be checked before it listens.

    Raises:
        InvalidConfig: a certificate cannot be read.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    check_tls(config)
    raise_limit()


async def serve_alone(
    app_of: Callable[[bool], ASGIApp],
    config: ServerConfig,
    end_streams: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0, or 1 if the server ends by itself.

    Args:
        app_of: makes the application; it is told whether only this machine reaches its socket.
        end_streams: breaks off answers that are still open.
        announce: called with the server's address once it answers.

    Raises:
        InvalidConfig: the address cannot be taken.
    """
    with bind(config) as listener:
        http = HttpServer(app_of(is_on_loopback(listener)), config, listener, _logger.warning)
        is_asked = asyncio.Event()

        def ask() -> None:
            if is_asked.is_set():  # the second Ctrl-C: do not wait for streams
                end_streams()
            is_asked.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask)
        serving, asked = await http.start(), asyncio.ensure_future(is_asked.wait())
        name = listener.getsockname()
        scheme = "http" if config.ssl_certfile is None else "https"
        announce(f"unix:{name}" if isinstance(name, str) else f"{scheme}://{config.host}:{name[1]}")
        try:
            await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return 1
            await wind_up([(http, serving)], list, config.shutdown_timeout, end_streams)
            return 0
        finally:
            asked.cancel()
