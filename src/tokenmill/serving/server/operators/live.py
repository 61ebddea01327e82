"""Serve GET /live, the current work of the engines as a stream of server-sent events, and GET /v1/requests."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import NotFound
from tokenmill.core.live import LiveRequest
from tokenmill.core.request import RequestStatus
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.errors import Forbidden, ServerBusy
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.live_hub import LiveHub

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
# What browsers say of a request that a page of another origin has made.
_FOREIGN = frozenset({"cross-site", "same-site"})


class OpenRequest(msgspec.Struct):
    """An entry of /v1/requests: a request that an engine has, in the words of `Request`.

    Attributes:
        phase: waiting, prefill, decode or preempted.
        wait_reason: why it waits; empty while it runs. row: the one that it owns; None: it has none.
        seconds: since it arrived.
        slack: seconds until its own `timeout` ends it; None: it has none.
        num_left_tokens: that it may still write until its limit (`max_tokens`, or the context).
    """

    id: str
    engine: int
    status: str
    phase: str
    wait_reason: str
    row: int | None
    seconds: float
    slack: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_left_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class LiveRoutes:
    """The handlers of /live and /v1/requests."""

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

    async def requests(self, _request: Request) -> Response:
        """List the requests that the engines have, those with rows first, at most 512 of each engine."""
        found = await self._context.engines.show_requests()
        shown = [_shown(one, index, report.now) for index, report in found for one in report.requests or ()]
        count = sum(report.num_requests for _, report in found)
        return json_response({"object": "list", "data": shown, "num_requests": count})


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


def _shown(request: LiveRequest, engine: int, now: float) -> OpenRequest:
    has_row = request.row >= 0
    phase = "decode" if request.first_at or request.num_output_tokens else "prefill"
    if not has_row:
        phase = "preempted" if request.status == RequestStatus.PREEMPTED.value else "waiting"
    return OpenRequest(
        id=request.id,
        engine=engine,
        status=request.status,
        phase=phase,
        wait_reason="" if has_row else request.wait_reason,
        row=request.row if has_row else None,
        seconds=round(max(0.0, now - request.arrived_at), 3) if request.arrived_at else 0.0,
        slack=round(max(0.0, request.deadline - now), 3) if request.deadline else None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_left_tokens=request.num_left_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )
