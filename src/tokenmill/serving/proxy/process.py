"""Run the process of the proxy: the HTTP server around its app, until it is told to stop."""

from __future__ import annotations

import asyncio

from tokenmill.config.configs import ServerConfig
from tokenmill.serving.proxy.app import Proxy
from tokenmill.serving.proxy.servers import Servers
from tokenmill.serving.server.http.alone import prepare, serve_alone


def serve(prefill: Servers, decode: Servers, config: ServerConfig, prefill_seconds: float) -> int:
    """Serve until Ctrl-C or SIGTERM, as `tokenmill serve` does; return 0, or 1 if the server ends by itself.

    Raises:
        InvalidConfig: the address cannot be taken, or a certificate cannot be read.
    """
    prepare(config)
    return asyncio.run(_serve(Proxy(prefill, decode, prefill_seconds, config), config))


async def _serve(proxy: Proxy, config: ServerConfig) -> int:
    try:
        return await serve_alone(proxy.app, config, proxy.end_streams)
    finally:
        await proxy.close()
