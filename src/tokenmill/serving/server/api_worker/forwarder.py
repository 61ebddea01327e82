"""Pass requests that need the state of the whole server from an API worker on to the first API process.

Generating and tokenizing are answered where the connection is; the first process alone answers operators and keeps what
lasts from one request to another (files, batches, stored responses).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.core.errors import EngineDead
from tokenmill.serving.server.http.errors import error_response
from tokenmill.serving.server.session_store import is_session_id

OWN_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"}
    | {"/generate", "/tokenize", "/detokenize", "/livez"}
    | {"/completion", "/completions", "/infill", "/embedding", "/apply-template"}
    | {"/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking", "/score", "/v1/score"}
    | {"/classify", "/pooling", "/embed", "/predict"}
)
# What the server between sets itself.
_HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class Forwarder:
    """An ASGI application that answers some routes with another application and forwards the rest."""

    def __init__(self, app: ASGIApp, root_path: str, address: Path) -> None:
        """
        Args:
            app: answers the routes that the API worker serves itself.
            root_path: a prefix that paths may have.
            address: the unix socket of the first API process.
        """
        self._app = app
        self._own = {prefix + path for prefix in {"", root_path} for path in OWN_ROUTES}
        # A connection for each request: one that is kept may be closed by the other side while it is taken again.
        self._transport = httpx.AsyncHTTPTransport(
            uds=str(address), limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or forward it."""
        if scope["type"] != "http" or (scope["path"] in self._own and not _is_turn(scope)):
            await self._app(scope, receive, send)
            return
        is_read = asyncio.Event()
        body = _body(receive, is_read) if _has_body(scope) else None
        if body is None:
            is_read.set()
        request = _request(scope, body)
        relay = asyncio.ensure_future(self._relay(request, scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive, is_read))
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (relay, gone):
                task.cancel()
            await asyncio.wait({relay, gone})
        if not relay.cancelled():
            relay.result()

    async def _relay(self, request: httpx.Request, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._transport.handle_async_request(request)
        except ClientDisconnect:
            return
        except httpx.HTTPError:
            error = EngineDead("the API process that answers this is being started again")
            await error_response(error)(scope, receive, send)
            return
        try:
            headers = [(name.lower(), value) for name, value in response.headers.raw]
            kept = [(name, value) for name, value in headers if name not in _HOP_HEADERS]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            assert isinstance(response.stream, httpx.AsyncByteStream), "an asynchronous transport has made it"
            async for part in response.stream:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


def _is_turn(scope: Scope) -> bool:
    """Return True for a call that goes on with an open session, which the first process keeps."""
    return any(name == b"x-session-id" and is_session_id(value.decode("latin-1")) for name, value in scope["headers"])


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _request(scope: Scope, body: AsyncIterator[bytes] | None) -> httpx.Request:
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    url = httpx.URL(scheme="http", host="first", raw_path=target)
    headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
    return httpx.Request(scope["method"], url, headers=headers, content=body)


async def _body(receive: Receive, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        if not message.get("more_body", False):
            is_read.set()
            return


async def _disconnected(receive: Receive, is_read: asyncio.Event) -> None:
    """Wait until the client is gone, which shows once its body has been read."""
    await is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
