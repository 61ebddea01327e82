"""Serve GET /live: the current work of the engines as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import NotFound
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.errors import Forbidden, ServerBusy
from tokenmill.serving.server.live_hub import LiveHub

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
# What browsers say of a request that a page of another origin has made.
_FOREIGN = frozenset({"cross-site", "same-site"})


class LiveRoutes:
    """The handler of /live."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def live(self, request: Request) -> Response:
        """Stream the turns of the engines' loops, their requests and cached prefixes, four times a second."""
        hub = self._context.live
        if hub is None:
            raise NotFound("this server has no live view of its engines")
        # It could read nothing of it, but would take viewers' places.
        if request.headers.get("sec-fetch-site") in _FOREIGN:
            raise Forbidden("a web page of another origin may not watch this server")
        if hub.is_full:
            raise ServerBusy("too many viewers are connected; try again later")
        return _LiveStream(hub)


class _LiveStream(Response):
    """A response that streams frames until the viewer leaves or is let go."""

    def __init__(self, hub: LiveHub) -> None:
        super().__init__()
        self.raw_headers = list(_HEADERS)
        self._hub = hub

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until either side ends the stream."""
        work = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._hub.watch()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": b"data: " + frame + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
