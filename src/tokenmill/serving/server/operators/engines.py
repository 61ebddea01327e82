"""Serve the routes of the engines: add one, remove one, replace them by ones with new weights; show a cached prefix."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import Conflict, NotFound
from tokenmill.serving.replicas.engine_handle import EngineHandle
from tokenmill.serving.replicas.fleet import Fleet
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.body import read_body, read_query
from tokenmill.serving.server.http.errors import Forbidden
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import tenant_of

MOST_SECONDS = 86_400
_LONGEST_NUMBER = 9


class RemoveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The seconds that an engine's requests may still take before other engines take them over."""

    timeout: Annotated[float, Meta(ge=0, le=MOST_SECONDS)] = 60.0


class WeightsBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's body as far as it applies here: requests are not paused for new weights."""

    model_path: str
    abort_all_requests: bool | None = None


class Prefix(msgspec.Struct):
    """The reply of /engines/{index}/prefixes/{number}: the first tokens of an edge, at most 100."""

    tokens: list[int]
    text: str


class EngineRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def list(self, _request: Request) -> Response:
        """List the engines and their state."""
        return json_response({"engines": [_shown(engine) for engine in self._context.engines]})

    async def add(self, _request: Request) -> Response:
        """Start one more engine; the reply comes when it takes requests."""
        return json_response({"engine": await self._fleet.add()})

    async def drain(self, request: Request) -> Response:
        """Stop giving an engine new requests."""
        self._fleet.drain(_number(request, "index"))
        return json_response({"status": "draining"})

    async def remove(self, request: Request) -> Response:
        """Drain an engine and end it."""
        self._fleet.remove(_number(request, "index"), read_query(request, RemoveQuery).timeout)
        return json_response({"status": "draining"})

    async def update_weights(self, request: Request) -> Response:
        """Replace all engines by ones with other weights; the reply comes when the first takes requests."""
        body = await read_body(request, WeightsBody, self._context.bodies)
        ready = await self._fleet.replace_weights(body.model_path)
        if body.abort_all_requests:
            await self._context.calls.abort_all()
        message = f"engine {ready.engine} serves {body.model_path}; open requests end with the weights that they have"
        shown = {"success": True, "message": message, "num_paused_requests": 0}
        return json_response(shown | {"system_fingerprint": self._context.fingerprint})

    async def prefix(self, request: Request) -> Response:
        """Show how an edge of an engine's prefix tree begins, as tokens and as text.

        Raises:
            Forbidden: the server has several keys, whose prompts share one tree.
            NotFound: there is no such engine or edge.
        """
        if tenant_of(request.scope):
            raise Forbidden("cached prefixes come from the prompts of all keys; a server of several keys shows none")
        index, number = _number(request, "index"), _number(request, "number")
        tokens = await self._context.engines.show_prefix(index, number)
        if not tokens:
            raise NotFound("no such prefix: it was evicted or has grown; GET /live names those that are there")
        return json_response(Prefix(tokens, await self._context.client.decode(tokens)))

    @property
    def _fleet(self) -> Fleet:
        if self._context.fleet is None:
            raise Conflict("this server's engines cannot be changed")
        return self._context.fleet


def _number(request: Request, name: str) -> int:
    """Return a number in a path: a few ASCII digits, while Python would accept other forms too."""
    number: str = request.path_params[name]
    if not (number.isascii() and number.isdecimal() and len(number) <= _LONGEST_NUMBER):
        raise NotFound("no such engine or prefix: both are named by their numbers, see GET /engines and GET /live")
    return int(number)


def _shown(engine: EngineHandle) -> dict[str, Any]:
    ready, stats = engine.ready, engine.stats
    return {
        "engine": engine.index,
        "status": "recovering" if ready is None else "draining" if engine.is_draining else "ready",
        "fingerprint": None if ready is None else ready.fingerprint,
        "num_running": 0 if stats is None else stats.num_running,
        "num_waiting": 0 if stats is None else stats.num_waiting,
    }
