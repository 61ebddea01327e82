"""Process every request before its route: check its head, give it an id, refuse it if there is no room or no API key.

Plain ASGI, no buffering.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.http.errors import (
    ANTHROPIC_PATH,
    HeadersTooLarge,
    ServerBusy,
    Unauthorized,
    error_response,
)
from tokenmill.serving.server.http.request_id import is_request_id

MAX_HEADER_BYTES = 32 * 1024
SEND_BODY = "send_body"
TENANT = "tenant"
BACKGROUND = "background"
OWNER = "owner"
NOTE_SURPLUS = "note_surplus"
# What a server of several models says to a model's own: the id of the batch that a request is a line of.
BATCH_HEADER = "x-tokenmill-batch"
# The names of fields that were left out of the body, as a header says them.
IGNORED = "ignored"
OPEN_ROUTES = frozenset({"/health", "/livez", "/readyz", "/ping", "/version"})
# Open where the server was started so.
METRICS_ROUTE = "/metrics"
NO_ROUTES: frozenset[str] = frozenset()


class RequestIdMiddleware:
    """Gives every request an id, the client's `X-Request-Id` or a random one, and puts it in the reply.

    Its `state` also holds a direct `send` for the parts of a body, past the middleware that only looks at the start
    of a reply: a token of a stream should not go through five coroutines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        label = Headers(scope=scope).get("x-request-id", "")
        request_id = label if is_request_id(label) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"], state[SEND_BODY] = request_id, send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if IGNORED in state:
                    headers["x-tokenmill-ignored"] = state[IGNORED]
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers["request-id"] = request_id  # where Anthropic's clients look for it
            await send(message)

        error = _head_error(scope)
        if error is not None:
            return await error_response(error)(scope, receive, send_with_id)
        try:
            return await self._app(scope, receive, send_with_id)
        finally:
            del state[SEND_BODY]  # it knows the scope: together they would wait for the garbage collector


def tenant_of(scope: Scope) -> str:
    """Return the tenant of a request, named after its key if there are several; else "". Tenants take turns."""
    return str(scope.get("state", {}).get(TENANT, ""))


def is_background(scope: Scope) -> bool:
    """Return True if a request is a line of a batch, which no client waits for."""
    return bool(scope.get("state", {}).get(BACKGROUND))


def owner_of(scope: Scope) -> str:
    """Return the owner whose files and batches a request may see: a hash of its key, or "" if there are no keys."""
    return str(scope.get("state", {}).get(OWNER, ""))


def owner_of_key(key: str) -> str:
    """Return what `owner_of` says of requests with a key."""
    return _hash(key).hex()


class SurplusMiddleware:
    """Refuses requests of connections beyond the limit, except on `OPEN_ROUTES`, so that monitoring gets through."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._open = open_paths(root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        note_surplus = scope.get("state", {}).get(NOTE_SURPLUS)
        if note_surplus is None or scope["path"] in self._open:
            return await self._app(scope, receive, send)
        note_surplus()
        error = ServerBusy("all connections that the server may have are in use; try again later")
        return await error_response(error, scope["path"])(scope, receive, send)


class ApiKeyMiddleware:
    """Requires an API key, except on `OPEN_ROUTES` and further routes that the application names.

    Where there is more than one key, a request's `state` holds which one it brought: see `tenant_of`.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], root_path: str, also_open: frozenset[str] = NO_ROUTES
    ) -> None:
        """Keep the keys as hashes of equal length, which are compared in constant time."""
        self._app = app
        self._hashes = [_hash(key) for key in api_keys]
        self._open = open_paths(root_path, OPEN_ROUTES | also_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in self._open or self._holds_key(scope):
            return await self._app(scope, receive, send)
        error = Unauthorized("a valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        return await error_response(error, scope["path"])(scope, receive, send)

    def _holds_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Anthropic's clients send the key in a header of its own.
        is_bearer = scheme.lower() == "bearer"
        given = _hash((key if is_bearer else headers.get("x-api-key", "")).strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        if not (is_bearer or "x-api-key" in headers) or not any(matches):
            return False
        state = scope.setdefault("state", {})
        state[OWNER] = given.hex()
        if len(matches) > 1:
            state[TENANT] = f"key {matches.index(True)}"
        return True


class BatchMiddleware:
    """Believes the server in front that a request is a line of a batch, which comes after all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and (batch_id := Headers(scope=scope).get(BATCH_HEADER)):
            scope.setdefault("state", {}).update({TENANT: batch_id, BACKGROUND: True})
        await self._app(scope, receive, send)


def _head_error(scope: Scope) -> InvalidRequest | None:
    """Return the error of a head that no route may accept; None: the head is fine."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        return HeadersTooLarge(f"the headers are larger than {MAX_HEADER_BYTES} bytes")
    num_hosts = sum(name == b"host" for name, _ in scope["headers"])
    if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] != "1.0"):
        return InvalidRequest(f"a request has one Host header, and this one has {num_hosts}")
    return None


def open_paths(root_path: str, routes: frozenset[str] = OPEN_ROUTES) -> frozenset[str]:
    """Return the paths of routes as they come with and without a proxy's prefix."""
    return routes | {root_path.rstrip("/") + route for route in routes}


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
