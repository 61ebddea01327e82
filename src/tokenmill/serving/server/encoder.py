"""A server that encodes images or sound for other servers, and does nothing else.

    POST /v1/encoder/outputs   a content, `MediaInput` in JSON with its bytes in base64  ->  its output, packed
    GET  /health               200 once it answers

It keeps nothing: the engines that ask have stores. Contents are encoded one at a time, since each takes all cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import QueueFull
from tokenmill.core.media import MediaInput
from tokenmill.serving.server.http.alone import prepare, serve_alone
from tokenmill.serving.server.http.body import read_body
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.stack import guard

ROUTE = "/v1/encoder/outputs"
# Contents that wait for others; more are refused at once, and their engines encode them.
MOST_WAITING = 64

Encode = Callable[[MediaInput], bytes]


class EncoderServer:
    """The application. `encode`: a content -> its packed output; raises InvalidRequest for what is no content."""

    def __init__(self, encode: Encode, config: ServerConfig) -> None:
        self._encode = encode
        self._config = config
        self._bodies = BodyBudget(self._config.max_body_bytes_in_flight)
        self._thread = ThreadPoolExecutor(1, "encode")
        self._num_waiting = 0

    def app(self, on_loopback: bool = False) -> Starlette:
        """Return the ASGI application; `on_loopback`: only this machine reaches its socket."""
        app = Starlette(
            routes=[
                Route(ROUTE, self.outputs, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
            ]
        )
        guard(app, self._config, on_loopback, frozenset())
        return app

    async def health(self, request: Request) -> Response:
        """Say that the encoder is there."""
        return Response()

    async def outputs(self, request: Request) -> Response:
        """Encode a content."""
        one = await read_body(request, MediaInput, self._bodies)
        if self._num_waiting >= MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} contents wait for the encoder already")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._thread, self._encode, one)
        finally:
            self._num_waiting -= 1
        return Response(data, media_type="application/octet-stream")


def serve_encoder(encode: Encode, config: ServerConfig, announce: Callable[[str], None]) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0, or 1 if the server ends by itself.

    Args:
        announce: called with the server's address once it answers.

    Raises:
        InvalidConfig: the address cannot be taken, or a certificate cannot be read.
    """
    prepare(config)
    return asyncio.run(serve_alone(EncoderServer(encode, config).app, config, announce=announce))
