"""What happens to every request before its route: a header limit, an id, and the API key. Plain ASGI, no buffering."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.server.errors import ANTHROPIC_PATH, HeadersTooLarge, Unauthorized, error_response

MAX_HEADER_BYTES = 32 * 1024
SEND_BODY = "send_body"
OPEN_ROUTES = frozenset({"/health", "/ping", "/version"})

_LABEL = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Gives every request an id: the client's `X-Request-Id`, or a random one. The reply carries it.

    Its `state` also holds the way out for the parts of a body, past all that only looks at how a reply starts: a token
    of a stream should not go through five coroutines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        label = Headers(scope=scope).get("x-request-id", "")
        request_id = label if _LABEL.fullmatch(label) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"], state[SEND_BODY] = request_id, send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers["request-id"] = request_id  # where Anthropic's clients look for it
            await send(message)

        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            response = error_response(HeadersTooLarge(f"the headers are larger than {MAX_HEADER_BYTES} bytes"))
            return await response(scope, receive, send_with_id)
        try:
            return await self._app(scope, receive, send_with_id)
        finally:
            del state[SEND_BODY]  # it knows the scope: together they would wait for the garbage collector


class ApiKeyMiddleware:
    """Lets only holders of a key pass, except on `OPEN_ROUTES`: what is not known to be open is guarded."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], root_path: str) -> None:
        """Keys are kept and compared as hashes of equal length, in constant time."""
        self._app = app
        self._hashes = [_hash(key) for key in api_keys]
        self._open = OPEN_ROUTES | {root_path.rstrip("/") + route for route in OPEN_ROUTES}

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
        return (is_bearer or "x-api-key" in headers) and any(matches)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
