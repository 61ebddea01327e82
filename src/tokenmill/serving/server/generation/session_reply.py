"""Reply to a call that is a turn of a session: wait for earlier turns, generate behind them, keep what was said.

The session grows only when the reply is complete: a turn that fails, or whose client leaves, can be sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import Conflict, InvalidRequest, TokenMillError
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.placement import SESSION
from tokenmill.serving.server.generation.reply import EVENTS, GenerationReply, ReplyHeaders, disconnected
from tokenmill.serving.server.generation.writer import ReplyWriter, UsageCounter
from tokenmill.serving.server.http.errors import RequestTimedOut, error_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.session_store import Kind, Session, Turn, is_session_id

_logger = logging.getLogger(__name__)


class Continuation(Protocol):
    """One turn of a session, in the form of its kind."""

    async def prompts(self) -> Sequence[GenerateText]:
        """Return the prompt: all complete turns, and this input behind them.

        Raises:
            InvalidRequest, TooLarge: it cannot go on so.
        """
        ...

    def keep(self) -> None:
        """Add the input and its answer to the session."""
        ...


class SessionReply(Response):
    """An ASGI response that runs a turn when its time has come, as a `GenerationReply`."""

    def __init__(
        self,
        context: ServerContext,
        session: Session,
        call: GenerationCall,
        turn: Continuation,
        writer: ReplyWriter,
        label: str,
    ) -> None:
        """Make a reply; the arguments are those of `GenerationReply`, whose prompts `turn` makes."""
        super().__init__()
        self._context = context
        self._session = session
        # One engine has what the session has computed, and its prompts are compared with each other.
        self._call = msgspec.structs.replace(call, session_key=session.id, conversation=session.id)
        self._continuation = turn
        self._writer = _Watched(writer, self._complete)
        self._label = label
        self._turn: Turn | None = None
        self._head = ReplyHeaders()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the session's earlier turns, then generate and send."""
        try:
            self._turn = self._session.accept(self._label)
            reply = await self._until_gone(self._turn, receive, send)
            if reply is not None:
                await reply(scope, receive, send)
        except TimeoutError:
            error = RequestTimedOut(f"the request's timeout of {self._call.timeout:g} seconds has passed")
            await self._refuse(error, scope, receive, send)
        except TokenMillError as refusal:
            await self._refuse(refusal, scope, receive, send)
        except Exception as failure:
            _logger.exception("a turn of a session failed")
            await self._refuse(failure, scope, receive, send)
        finally:
            self._end(is_kept=False)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        if self._head.is_sent:
            await send({"type": "http.response.body", "body": self._writer.failure(error), "more_body": False})
        else:
            await error_response(error, scope["path"])(scope, receive, send)

    def _complete(self) -> None:
        """Keep the turn and let the next one begin, before the end of the reply is sent: its reader finds both done."""
        self._continuation.keep()
        self._end(is_kept=True)

    def _end(self, is_kept: bool) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._context.sessions.end_turn(self._session, turn, is_kept)

    async def _until_gone(self, turn: Turn, receive: Receive, send: Send) -> GenerationReply | None:
        """Return the reply of a turn that may begin; None: its client has left. A stream gets pings meanwhile."""
        begins = asyncio.ensure_future(self._begin(turn))
        gone = asyncio.ensure_future(disconnected(receive))
        silence = self._context.sse_ping if self._call.stream else 0.0
        try:
            while not (await asyncio.wait((begins, gone), timeout=silence or None, return_when=FIRST_COMPLETED))[0]:
                await self._head.send(send, EVENTS.headers)
                await send({"type": "http.response.body", "body": self._writer.ping, "more_body": True})
            return begins.result() if begins.done() else None
        finally:
            for task in (begins, gone):
                task.cancel()
            await asyncio.gather(begins, gone, return_exceptions=True)

    async def _begin(self, turn: Turn) -> GenerationReply:
        arrived = time.monotonic()
        async with asyncio.timeout(self._call.timeout):
            await asyncio.shield(turn.begins)  # it outlives a client that leaves
            prompts = await self._continuation.prompts()
        if turn.is_aborted:
            raise Conflict("the session's turns were aborted before this one began: send the input again")
        reply = GenerationReply(self._context, self._call, prompts, self._writer, self._label, self._head)
        reply.waited = time.monotonic() - arrived
        turn.end_requests = reply.end_requests
        return reply


class _Watched:
    """A `ReplyWriter` that tells when a reply is complete."""

    def __init__(self, writer: ReplyWriter, completed: Callable[[], None]) -> None:
        self.ping = writer.ping
        self.events = writer.events
        self.failure = writer.failure
        self._writer = writer
        self._completed = completed

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole reply."""
        body = self._writer.document(outputs, usage)
        self._completed()
        return body

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the last events."""
        self._completed()
        return self._writer.last_events(usage)


def session_of(context: ServerContext, scope: Scope, kind: Kind) -> Session | None:
    """Return the session that a call's header names; None: it names none that this server has made.

    Raises:
        NotFound: its owner has no such session.
        InvalidRequest: it is of another kind.
    """
    name = next((value.decode("latin-1") for key, value in scope["headers"] if key == SESSION.encode()), "")
    if not is_session_id(name):
        return None
    return checked_kind(context.sessions.get(owner_of(scope), name), kind)


def checked_kind(session: Session, kind: Kind) -> Session:
    """Return the session if it is of this kind; raise InvalidRequest if not."""
    if session.kind != kind:
        raise InvalidRequest(f"the session is a {session.kind}, and this is the input of a {kind}", SESSION)
    return session
