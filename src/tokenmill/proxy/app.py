"""The proxy: a request's prompt goes to one server, and the request, with what that has answered, to another.

    client ─ body ─> proxy ─ prompt, one token, "hold its pages" ─> prefill server
                     proxy <─ kv_transfer_params ─
                     proxy ─ body, kv_transfer_params ─> decode server ─ pages ─> fetched from the prefill server
    client <──────── the decode server's reply, byte by byte ────────

A prefill server that is dead, slow or busy costs a request nothing but time: the decode server computes alone. What
`kv_transfer_params` a client sends is dropped. All other paths are the decode server's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tokenmill.proxy.bodies import decode_body, may_split, prefill_body
from tokenmill.proxy.servers import Server, Servers

logger = logging.getLogger(__name__)

GENERATING = ("/v1/completions", "/v1/chat/completions")
LARGEST_BODY = 64 << 20
CONNECT_SECONDS = 5.0
CLIENT_GONE = 499
_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]
# Of one hop only, or made anew by whoever sends the body on.
_OWN_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-length", "host", "keep-alive", "proxy-authenticate"}
    | {"proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
)


Outcome = TypeVar("Outcome")


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class Proxy:
    """Answers for servers that compute prompts and servers that go on.

    Args:
        prefill_seconds: after which a prompt is left to the decode server.
        transport: of the client; tests bring their own.
    """

    def __init__(
        self,
        prefill: Servers,
        decode: Servers,
        prefill_seconds: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        # An answer may take as long as it takes; only connecting and a prompt are timed.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Replies are passed on as they come, so they come in a form that any client takes.
        headers = {"accept-encoding": "identity"}
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, headers=headers)
        self._prefill_seconds = prefill_seconds

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route(path, self.generate, methods=["POST"]) for path in GENERATING]
        routes.append(Route("/{path:path}", self.forward, methods=_METHODS))
        return Starlette(routes=routes)

    async def close(self) -> None:
        """Close all connections to servers."""
        await self._http.aclose()

    async def generate(self, request: Request) -> Response:
        """A request whose prompt one server computes and another goes on with."""
        data = await _read(request)
        if data is None:
            return _error(413, f"the body exceeds {LARGEST_BODY} bytes")
        try:
            body = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            return await self._send(request, data, {})  # the server says what is wrong with it
        name = request.headers.get("x-request-id") or secrets.token_hex(16)
        try:
            params = await _unless_gone(request, self._prompt(request, body, name)) if may_split(body) else None
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)  # nobody sees it
        return await self._send(request, msgspec.json.encode(decode_body(body, params)), {"x-request-id": name})

    async def forward(self, request: Request) -> Response:
        """Anything else."""
        data = await _read(request)
        if data is None:
            return _error(413, f"the body exceeds {LARGEST_BODY} bytes")
        return await self._send(request, data, {})

    async def _prompt(self, request: Request, body: dict[str, Any], name: str) -> dict[str, Any] | None:
        """Let a server compute the prompt; where its pages are, or None: nobody has them."""
        data = msgspec.json.encode(prefill_body(body))
        headers = _headers(request.headers) | {"x-request-id": name}
        for server in self._prefill.fit():
            try:
                with self._prefill.serving(server):
                    async with asyncio.timeout(self._prefill_seconds):
                        reply = await self._http.post(server.url + request.url.path, content=data, headers=headers)
            except (httpx.HTTPError, TimeoutError) as error:
                logger.warning("%s does not compute a prompt: %s", server.url, str(error) or type(error).__name__)
                self._prefill.failed(server)
                continue
            if reply.status_code == httpx.codes.OK:
                return _params(reply)
            logger.info("%s does not compute a prompt: status %d", server.url, reply.status_code)
            return None
        return None

    async def _send(self, request: Request, data: bytes, own_headers: Mapping[str, str]) -> Response:
        """Send a body to a decode server, and its reply to the client as it comes."""
        headers = _headers(request.headers) | dict(own_headers)
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        for server in self._decode.in_turn():
            url = httpx.URL(server.url + path, query=request.scope["query_string"] or None)
            try:
                upstream = await self._http.send(
                    self._http.build_request(request.method, url, content=data, headers=headers), stream=True
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                logger.warning("%s cannot be reached: %s", server.url, error)
                self._decode.failed(server)
                continue
            except httpx.HTTPError as error:
                return _error(502, f"the decode server failed: {type(error).__name__}")
            body = self._pass_on(server, upstream)
            return StreamingResponse(body, upstream.status_code, _headers(upstream.headers))
        return _error(503, "no decode server can be reached")

    async def _pass_on(self, server: Server, upstream: httpx.Response) -> AsyncIterator[bytes]:
        with self._decode.serving(server):
            try:
                async for chunk in upstream.aiter_raw():
                    yield chunk
            finally:
                await upstream.aclose()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """The outcome of `work`.

    Raises:
        ClientDisconnect: the client has left before; the work is cancelled.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _read(request: Request) -> bytes | None:
    """The body; None: it is too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_BODY:
            return None
    return bytes(data)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _params(reply: httpx.Response) -> dict[str, Any] | None:
    """What a prefill server says of where the pages are; None: nothing."""
    try:
        return msgspec.json.decode(reply.content, type=_PrefillReply).kv_transfer_params
    except msgspec.DecodeError:
        return None


def _headers(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name.lower() not in _OWN_HEADERS}


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "proxy_error", "param": None, "code": None}
    return Response(msgspec.json.encode({"error": error}), status, media_type="application/json")
