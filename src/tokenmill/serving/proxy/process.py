"""Run the process of the proxy: the HTTP server around its app, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.proxy.app import Proxy
from tokenmill.serving.proxy.servers import Servers
from tokenmill.serving.server.http.descriptors import raise_limit
from tokenmill.serving.server.http.listener import bind, check_tls, is_on_loopback
from tokenmill.serving.server.http.server import HttpServer, wind_up

_logger = logging.getLogger(__name__)


def serve(prefill: Servers, decode: Servers, config: ServerConfig, prefill_seconds: float) -> int:
    """Serve until Ctrl-C or SIGTERM, as `tokenmill serve` does; return 0, or 1 if the server ends by itself.

    Raises:
        InvalidConfig: the address cannot be taken, or a certificate cannot be read.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    check_tls(config)
    raise_limit()
    return asyncio.run(_serve(Proxy(prefill, decode, prefill_seconds, config), config))


async def _serve(proxy: Proxy, config: ServerConfig) -> int:
    with bind(config) as listener:
        http = HttpServer(proxy.app(is_on_loopback(listener)), config, listener, _logger.warning)
        is_asked = asyncio.Event()

        def ask() -> None:
            if is_asked.is_set():  # the second Ctrl-C: do not wait for streams
                proxy.end_streams()
            is_asked.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask)
        serving, asked = await http.start(), asyncio.ensure_future(is_asked.wait())
        try:
            await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return 1
            await wind_up([(http, serving)], list, config.shutdown_timeout, proxy.end_streams)
            return 0
        finally:
            asked.cancel()
            await proxy.close()
