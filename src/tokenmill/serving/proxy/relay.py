"""Relay a decode server's reply to the client as it comes, and end it properly if it breaks off.

Of a stream of events only whole ones are passed on, so an error can follow where the next one would begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.proxy.errors import ServerFailed
from tokenmill.serving.server.http.errors import ANTHROPIC_PATH, ServerStopping, anthropic_body, error_body

Outcome = TypeVar("Outcome")

_RESPONSES_PATH = "/v1/responses"
EVENTS = "text/event-stream"


class Head(NamedTuple):
    """The beginning of a reply; `is_events`: it is a stream of events."""

    status: int
    headers: dict[str, str]
    is_events: bool


async def whole_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream, cut between events; an event that breaks off is left out."""
    rest = bytearray()
    async for part in parts:
        begun = max(len(rest) - 1, 0)
        rest += part
        end = rest.rfind(b"\n\n", begun) + 2
        if end >= 2:
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)


class Relay(Response):
    """Sends a reply until it ends, the client leaves, or its time is over."""

    def __init__(
        self, parts: AsyncIterator[bytes], head: Head, patience: asyncio.Timeout, serving: AsyncExitStack
    ) -> None:
        """Relay a reply; `patience` has not begun, and `serving` is exited at the end."""
        super().__init__(None, head.status)
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers.items()]
        self._parts = parts
        self._is_events = head.is_events
        self._patience = patience
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole reply."""
        await self.relay(scope["path"], receive, send)

    @property
    def is_events(self) -> bool:
        """True if the reply is a stream of events."""
        return self._is_events

    async def relay(self, path: str, receive: Receive, send: Send, is_begun: bool = False) -> None:
        """Send the reply, or if it `is_begun` what follows its head."""
        async with self._serving:
            work = asyncio.ensure_future(self._send(path, send, is_begun))
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.wait((work, gone))
            if not work.cancelled():
                work.result()

    async def _send(self, path: str, send: Send, is_begun: bool) -> None:
        error: TokenMillError | None = None
        try:
            async with self._patience:
                if not is_begun:
                    head = {"status": self.status_code, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **head})
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.HTTPError:
            error = ServerFailed("the server that answered this has failed; the answer is incomplete")
        except TimeoutError:
            error = ServerStopping("the server is stopping")
        # What is no stream stays without its end, and the connection is closed: the client sees that it is not whole.
        if error is None or self._is_events:
            await send({"type": "http.response.body", "body": b"" if error is None else error_event(error, path)})


class OpenReplies:
    """The replies of a server that relays; all can be broken off, with an error where there is a way to send it."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()

    @contextmanager
    def timeout(self) -> Iterator[asyncio.Timeout]:
        """Yield a timeout that ends when all replies are ended."""
        patience = asyncio.timeout(None)
        self._open.add(patience)
        try:
            yield patience
        finally:
            self._open.discard(patience)

    def end(self) -> None:
        """Break off the answers that are still open."""
        now = asyncio.get_running_loop().time()
        for patience in self._open:
            patience.reschedule(now)

    async def unless_over(self, request: Request, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Return the outcome of `work`.

        Raises:
            ClientDisconnect: the client left first; the work is cancelled.
            ServerStopping: the server ends.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
        with self.timeout() as patience:
            try:
                async with patience:
                    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise ClientDisconnect
                return task.result()
            except TimeoutError:
                if not patience.expired():
                    raise
                raise ServerStopping("the server is stopping") from None
            finally:
                for one in (task, gone):
                    one.cancel()
                await asyncio.wait((task, gone))


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_event(error: TokenMillError, path: str) -> bytes:
    """Return the event that ends a broken stream, in the form of the API that the path belongs to."""
    if path.startswith(ANTHROPIC_PATH):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_body(error)) + b"\n\n"
    body = error_body(error)
    if path.startswith(_RESPONSES_PATH):
        told = {"type": "error", "code": body.error.type, "message": body.error.message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"
