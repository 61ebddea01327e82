"""Run the proxy: one server computes a request's prompt, and another one continues with the pages of the first.

    client ─ body ─> proxy ─ prompt, one token, "hold its pages" ─> prefill server
                     proxy <─ kv_transfer_params ─
                     proxy ─ body, kv_transfer_params ─> decode server ─ pages ─> fetched from the prefill server
    client <──────── the decode server's reply, event by event ────────

A prefill server that is dead, slow or busy only costs a request time: another one is asked, or the decode server
computes alone. A decode server that fails before the first byte of its answer is replaced by another one. A client's
own `kv_transfer_params` are dropped. All other paths go to the decode server.

In front of it all stand the limits and guards of every server here (`server.http`): the servers behind see no browser.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidRequest, TooLarge
from tokenmill.serving.proxy.errors import NoServer, ServerFailed
from tokenmill.serving.proxy.forward import asked_headers, relayed
from tokenmill.serving.proxy.relay import OpenReplies
from tokenmill.serving.proxy.servers import Server, Servers
from tokenmill.serving.server.http.body import MAX_BODY_BYTES, read_body
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.browser_guard import FILES_ROUTE
from tokenmill.serving.server.http.page import page_routes
from tokenmill.serving.server.http.stack import guard

logger = logging.getLogger(__name__)

SPLIT = ("/v1/completions", "/v1/chat/completions")
CONNECT_SECONDS = 5.0
# A request that ends one server after the other is not given to all of them.
MOST_FAILURES = 2
_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]
# What may be asked twice: it changes nothing.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})

PARAMS = "kv_transfer_params"
# vLLM's proxies send all of them.
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What the prompt does not depend on, and one token has no need for, or has no room for.
_DROPPED = (
    "best_of", "echo", "include_stop_str_in_output", "logprobs", "max_completion_tokens", "min_tokens", "n",
    "prompt_logprobs", "request_id", "response_format", "return_token_ids", "stop", "stop_token_ids", "stream_options",
    "structured_outputs", "top_logprobs",
)  # fmt: skip


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class Proxy:
    """A proxy in front of servers that compute prompts and servers that decode.

    Args:
        prefill_seconds: seconds after which a prompt is left to the decode server.
        config: the limits and guards; those of `tokenmill serve`.
        transport: the HTTP client's transport; tests bring their own.
    """

    def __init__(
        self,
        prefill: Servers,
        decode: Servers,
        prefill_seconds: float = 120.0,
        config: ServerConfig | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._config = config or ServerConfig()
        self._bodies = BodyBudget(self._config.max_body_bytes_in_flight)
        # An answer may take as long as it takes; only connecting and a prompt are timed.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Replies are passed on as they come, so they come in a form that any client takes.
        headers = {"accept-encoding": "identity"}
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, headers=headers)
        self._prefill_seconds = prefill_seconds
        self._open = OpenReplies()

    def app(self, on_loopback: bool = False) -> Starlette:
        """Return the ASGI application; `on_loopback`: only this machine reaches its socket."""
        routes = [Route(path, self.generate, methods=["POST"]) for path in SPLIT]
        routes.append(Route("/{path:path}", self.forward, methods=_METHODS))
        app = Starlette(routes=routes)
        guard(app, self._config, on_loopback, frozenset(page_routes()))
        return app

    def end_streams(self) -> None:
        """Break off the answers that are still open, with an error where there is a way to send it."""
        self._open.end()

    async def close(self) -> None:
        """Close all connections to servers."""
        await self._http.aclose()

    async def generate(self, request: Request) -> Response:
        """Have one server compute a prompt and another go on with it."""
        body = await read_body(request, dict[str, Any], self._bodies)
        alone = _encoded(decode_body(body, None))

        async def work() -> Response:
            params = await self._prompt(request, body) if may_split(body) else None
            first = alone if params is None else _encoded(decode_body(body, params))
            return await self._answer(request, first, alone)

        return await self._open.unless_over(request, work())

    async def forward(self, request: Request) -> Response:
        """Send any other request to a decode server, and its body as it comes."""
        if _has_body(request):
            return await self._answer(request, _limited(request), None)
        return await self._open.unless_over(request, self._answer(request, None, None))

    async def _prompt(self, request: Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """Let a server compute the prompt; return where its pages are, or None if no server has them."""
        data, headers = _encoded(prefill_body(body)), asked_headers(request)
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
            if reply.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                return None  # the next one would say the same of it
        return None

    async def _answer(
        self, request: Request, first: bytes | AsyncIterator[bytes] | None, again: bytes | None
    ) -> Response:
        """Let a decode server answer, or another one if it fails or is busy before the first byte of its answer.

        Args:
            first, again: the body for the first server that is reached, and for those that are asked after it has had
                it: pages may be fetched once. None: the effect of a second request is not known.

        Raises:
            NoServer: no server can be reached.
            ServerFailed: the servers failed with the request.
        """
        is_repeatable = again is not None or request.method in _REPEATABLE
        num_failures = 0
        busy: Response | None = None
        for server in self._decode.in_turn():
            try:
                reply = await self._ask(request, server, again if num_failures or busy else first)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                logger.warning("%s cannot be reached: %s", server.url, error)
                self._decode.failed(server)
            except httpx.HTTPError as error:
                logger.warning("%s has failed with a request: %s", server.url, type(error).__name__)
                self._decode.failed(server)
                num_failures += 1
                if num_failures == MOST_FAILURES or not is_repeatable:
                    break
            else:
                if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE or again is None:
                    return reply
                busy = reply
        if busy is not None:
            return busy
        if num_failures:
            raise ServerFailed("the servers that should have answered have failed; try again")
        raise NoServer("no decode server can be reached; try again later")

    async def _ask(self, request: Request, server: Server, content: bytes | AsyncIterator[bytes] | None) -> Response:
        """Return a server's reply: the whole, or its beginning if it is a stream or passed on as it is.

        Raises:
            HTTPError: the server failed before that.
        """
        path: str = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        url = httpx.URL(server.url + path, query=request.scope["query_string"] or None)
        headers = asked_headers(request)
        if isinstance(content, AsyncIterator) and "content-length" in request.headers:
            headers["content-length"] = request.headers["content-length"]
        asked = self._http.build_request(request.method, url, content=content, headers=headers)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._decode.serving(server))
            return await relayed(self._http, asked, stack, self._open, keeps_whole=isinstance(content, bytes))


def _limited(request: Request) -> AsyncIterator[bytes]:
    """Return the body as it comes; only files may be large, as they are never held in memory.

    Raises:
        TooLarge: its declared length is larger than the servers take; the iterator raises it if that shows later.
    """
    if request.url.path.endswith(FILES_ROUTE):
        return request.stream()
    too_large = TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large

    async def parts() -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise too_large
            yield part

    return parts()


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


def _encoded(body: dict[str, Any]) -> bytes:
    """Return the body for a server as JSON.

    Raises:
        InvalidRequest: it is nested too deeply to be encoded.
    """
    try:
        return msgspec.json.encode(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error


def _params(reply: httpx.Response) -> dict[str, Any] | None:
    """Return a prefill server's parameters that say where the pages are; None: it gives no such parameters."""
    try:
        return msgspec.json.decode(reply.content, type=_PrefillReply).kv_transfer_params
    except msgspec.DecodeError:
        return None


def may_split(body: dict[str, Any]) -> bool:
    """Return True if two servers can share a request: it has one prompt and only wants what follows it."""
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(part, int) for part in prompt))
    wants_prompt = body.get("echo") or body.get("prompt_logprobs") is not None
    return ("messages" in body or is_one) and not wants_prompt


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body for the server that computes the prompt."""
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return kept | {"stream": False, "max_tokens": 1, PARAMS: HOLD}


def decode_body(body: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the body for the server that decodes; `params`: the prefill server's answer; None: it computes alone."""
    kept = {name: value for name, value in body.items() if name != PARAMS}
    return kept if params is None else kept | {PARAMS: params}
