"""The process of the proxy: a listener around the app, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import uvicorn

from tokenmill.proxy.app import Proxy
from tokenmill.proxy.servers import Servers

SHUTDOWN_SECONDS = 3


def serve(prefill: Sequence[str], decode: Sequence[str], host: str, port: int, prefill_seconds: float) -> int:
    """Serve until Ctrl-C or SIGTERM; returns 0, or 1 where the port cannot be listened on."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    return asyncio.run(_serve(Proxy(Servers(prefill), Servers(decode), prefill_seconds), host, port))


async def _serve(proxy: Proxy, host: str, port: int) -> int:
    config = uvicorn.Config(
        proxy.app(), host=host, port=port, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS
    )
    server = uvicorn.Server(config)
    try:
        await server.serve()
    finally:
        await proxy.close()
    return 0 if server.started else 1
