"""Answer a request with what its model's server says, however long the model takes to be there.

A client that waits for a stream gets a comment every second while its model is loaded, with the reason; an error that
comes after that is an event. All others wait in silence. A request whose server dies before the first byte of its
answer is asked again: nobody has seen anything of it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import urlencode

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.models.asked import Asked, path_of
from tokenmill.serving.models.catalogue import Entry
from tokenmill.serving.models.errors import ModelDied
from tokenmill.serving.models.service import Claim, ModelService
from tokenmill.serving.proxy.forward import asked_headers, relayed
from tokenmill.serving.proxy.relay import EVENTS, OpenReplies, Relay, disconnected, error_event
from tokenmill.serving.server.http.errors import error_response

# A stream that begins is answered 200: sooner, an error would still have a status of its own.
FIRST_SIGN_SECONDS = 1.0
SIGN_SECONDS = 1.0
_MOST_TRIES = 3
_HEEDED = ("keep_alive", "ttl")
_IGNORED = "x-tokenmill-ignored"


class Answers:
    """Lets requests go to their models."""

    def __init__(self, service: ModelService, replies: OpenReplies) -> None:
        self._service = service
        self._replies = replies

    async def answer(self, request: Request, entry: Entry, asked: Asked) -> Response:
        """Return the answer of a model, which is loaded for it.

        Raises:
            ModelTooLarge, ModelFailed, ModelNotLoaded, QueueFull: it cannot be, or not in time.
            ModelDied: its server died several times over this request.
            ClientDisconnect, ServerStopping: nobody waits for it any more.
        """
        claim = self._service.claim(entry)
        if asked.is_stream:
            return _Waiting(self, request, claim, asked)
        return await self._replies.unless_over(request, self.obtain(request, claim, asked))

    async def load(self, request: Request, entry: Entry, keep_alive: float | None) -> None:
        """Wait until a model is loaded; raise as `answer` does."""
        claim = self._service.claim(entry)
        try:
            await self._replies.unless_over(request, claim.admitted())
        finally:
            claim.leave(keep_alive)

    async def obtain(self, request: Request, claim: Claim, asked: Asked) -> Response:
        """Wait for a model, and return its reply, whole or begun; the claim is given back at the end of it."""
        for tries_left in reversed(range(_MOST_TRIES)):
            async with AsyncExitStack() as stack:
                stack.callback(claim.leave, asked.keep_alive)
                server = await claim.admitted()
                try:
                    return await self.ask(request, server.http, asked.body, stack)
                except httpx.HTTPError as error:
                    if not tries_left:
                        raise ModelDied(f"the server of model {claim.ticket.model} has failed; try again") from error
            await server.lost()
            claim = self._service.claim(self._service.catalogue[claim.ticket.model])
        raise AssertionError("the last try returns or raises")

    async def ask(
        self, request: Request, http: httpx.AsyncClient, body: bytes | None, stack: AsyncExitStack
    ) -> Response:
        """Return the reply of a model's server.

        Raises:
            HTTPError: it failed before the first byte.
        """
        if http.is_closed:
            raise httpx.ConnectError("the server is gone, and its end is not counted yet")
        # Which model is meant is no question for its server.
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "model"]
        url = httpx.URL(path=path_of(request), query=urlencode(query).encode() or None)
        made = http.build_request(request.method, url, content=body, headers=asked_headers(request))
        reply = await relayed(http, made, stack, self._replies, keeps_whole=True)
        return _without_heeded(reply)


class _Waiting(Response):
    """A reply that shows signs of life until the model's own begins."""

    def __init__(self, answers: Answers, request: Request, claim: Claim, asked: Asked) -> None:
        super().__init__(None)
        # Nobody knows its length yet.
        self.raw_headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache")]
        self._claim = claim
        self._work = asyncio.ensure_future(answers.obtain(request, claim, asked))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole reply."""
        path, work = scope["path"], self._work
        gone = asyncio.ensure_future(disconnected(receive))
        is_begun = False
        try:
            await asyncio.wait((work, gone), timeout=FIRST_SIGN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            while not work.done() and not gone.done():
                if not is_begun:
                    is_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send(_part(f": {self._claim.reason}\n\n".encode()))
                await asyncio.wait((work, gone), timeout=SIGN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait((gone, work))
        if work.cancelled():
            return
        if (error := work.exception()) is None:
            reply = work.result()
        elif isinstance(error, TokenMillError):
            reply = error_response(error, path)
        else:
            raise error
        await _send(reply, path, is_begun, scope, receive, send)


async def _send(reply: Response, path: str, is_begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a reply, or if its head has gone out already what belongs behind it."""
    if not is_begun:
        await reply(scope, receive, send)
    elif isinstance(reply, Relay) and reply.is_events:
        await reply.relay(path, receive, send, is_begun=True)
    else:
        await send(_part(error_event(_Refused(reply), path), more=False))


class _Refused(TokenMillError):
    """The refusal of a model's server, as an error of this one."""

    def __init__(self, reply: Response) -> None:
        self.status = reply.status_code
        try:
            said = msgspec.json.decode(reply.body, type=dict[str, dict[str, str | None]])["error"]
        except (msgspec.DecodeError, KeyError):
            said = {}
        self.type = said.get("type") or TokenMillError.type
        self.param, self.code = said.get("param"), said.get("code")
        super().__init__(said.get("message") or f"the model's server answered {reply.status_code}")


def _part(content: bytes, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def _without_heeded(reply: Response) -> Response:
    """Take out of a reply's header the names of fields that its server left out, and this one has heeded."""
    named = reply.headers.get(_IGNORED)
    if named is not None:
        left = [name for name in named.split(", ") if name not in _HEEDED]
        del reply.headers[_IGNORED]
        if left:
            reply.headers[_IGNORED] = ", ".join(left)
    return reply
