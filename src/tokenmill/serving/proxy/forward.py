"""Send a request on to another server, and return its reply: the whole, or its beginning and the rest as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import httpx
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serving.proxy.relay import EVENTS, Head, OpenReplies, Relay, whole_events
from tokenmill.serving.server.http.middleware import BATCH_HEADER

# Of one hop only, made anew by the sender of the next hop, or of a browser: its page is this server's own, which the
# servers behind cannot know. Nor may a client say what only a server in front may.
_OWN_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-length", "date", "host", "keep-alive", "origin", "proxy-authenticate"}
    | {"proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id", BATCH_HEADER}
)


def asked_headers(request: Request) -> dict[str, str]:
    """Return the headers of a client's request to a server behind."""
    return passed_headers(request.headers) | {"x-request-id": request.state.request_id}


def passed_headers(given: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are passed on."""
    return {name: value for name, value in given.items() if name.lower() not in _OWN_HEADERS}


async def relayed(
    http: httpx.AsyncClient, asked: httpx.Request, stack: AsyncExitStack, replies: OpenReplies, keeps_whole: bool
) -> Response:
    """Return a server's reply: the whole, or its beginning if it is a stream or is passed on as it is.

    Args:
        stack: entered; a reply that goes on takes over what it holds.
        keeps_whole: read a reply that is no stream of events whole before it is passed on.

    Raises:
        HTTPError: the server failed before that.
    """
    upstream = await http.send(asked, stream=True)
    stack.push_async_callback(upstream.aclose)
    parts = upstream.aiter_raw()
    is_events = upstream.headers.get("content-type", "").startswith(EVENTS)
    head = Head(upstream.status_code, passed_headers(upstream.headers), is_events)
    if keeps_whole and not is_events:
        return Response(b"".join([part async for part in parts]), head.status, head.headers)
    first = await anext(parts, b"")
    patience = stack.enter_context(replies.timeout())
    reply = _begun(first, parts)
    return Relay(whole_events(reply) if is_events else reply, head, patience, stack.pop_all())


async def _begun(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in parts:
        yield part
