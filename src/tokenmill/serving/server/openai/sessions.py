"""Serve /v1/sessions: open conversations that the server remembers, extend, abort, list and close them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.body import read_body
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.openai.chat import ChatRoute
from tokenmill.serving.server.openai.completions import TextRoute
from tokenmill.serving.server.session_store import IDLE_SECONDS, Kind, Session


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions: what its turns are, and seconds without one after which it ends."""

    kind: Kind | None = None
    idle_timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class SessionsRoutes:
    """The handlers of /v1/sessions."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._store = context.sessions
        self._chat, self._text = ChatRoute(context), TextRoute(context)

    async def open(self, request: Request) -> Response:
        """Open a session."""
        body = await read_body(request, SessionBody, self._context.bodies)
        idle_timeout = IDLE_SECONDS if body.idle_timeout is None else body.idle_timeout
        return json_response(_shown(self._store.open(owner_of(request.scope), body.kind or "chat", idle_timeout)))

    async def input(self, request: Request) -> Response:
        """Extend a session: a turn, answered as by the route of its kind."""
        session = self._named(request)
        route = self._chat if session.kind == "chat" else self._text
        return await route.answer(request, session)

    async def abort(self, request: Request) -> Response:
        """End the open turns of a session; the running one is answered with what it has."""
        session = self._named(request)
        return json_response({"id": session.id, "num_aborted": session.abort()})

    async def get(self, request: Request) -> Response:
        """Show a session."""
        return json_response(_shown(self._named(request)))

    async def list(self, request: Request) -> Response:
        """List the sessions of a key, the most recently used first."""
        sessions = self._store.of(owner_of(request.scope))
        return json_response({"object": "list", "data": [_shown(session) for session in reversed(sessions)]})

    async def delete(self, request: Request) -> Response:
        """Close a session."""
        session = self._named(request)
        self._store.close(session)
        return json_response({"id": session.id, "object": "session.deleted", "deleted": True})

    def _named(self, request: Request) -> Session:
        return self._store.get(owner_of(request.scope), request.path_params["session_id"])


def _shown(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "kind": session.kind,
        "created_at": session.created,
        "idle_timeout": session.idle_timeout,
        "expires_at": None if session.expires is None else int(session.expires),
        "num_turns": session.num_turns,
        "num_messages": len(session.messages),
        "num_tokens": len(session.token_ids),
        "open_turns": [turn.label for turn in session.turns],
    }
