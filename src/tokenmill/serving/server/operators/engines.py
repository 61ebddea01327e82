"""Serve the routes that change the engines: add one, remove one, replace them by engines with new weights."""

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
from tokenmill.serving.server.http.json_response import json_response

MOST_SECONDS = 86_400
_LONGEST_INDEX = 9


class RemoveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The seconds that an engine's requests may still take before other engines take them over."""

    timeout: Annotated[float, Meta(ge=0, le=MOST_SECONDS)] = 60.0


class WeightsBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's body as far as it applies here: requests are not paused for new weights."""

    model_path: str
    abort_all_requests: bool | None = None


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
        self._fleet.drain(_index(request))
        return json_response({"status": "draining"})

    async def remove(self, request: Request) -> Response:
        """Drain an engine and end it."""
        self._fleet.remove(_index(request), read_query(request, RemoveQuery).timeout)
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

    @property
    def _fleet(self) -> Fleet:
        if self._context.fleet is None:
            raise Conflict("this server's engines cannot be changed")
        return self._context.fleet


def _index(request: Request) -> int:
    """Return the engine's index in a path: a few ASCII digits, while Python would accept other forms too."""
    index: str = request.path_params["index"]
    if not (index.isascii() and index.isdecimal() and len(index) <= _LONGEST_INDEX):
        raise NotFound("no such engine: engines are named by their numbers, see GET /engines")
    return int(index)


def _shown(engine: EngineHandle) -> dict[str, Any]:
    ready, stats = engine.ready, engine.stats
    return {
        "engine": engine.index,
        "status": "recovering" if ready is None else "draining" if engine.is_draining else "ready",
        "fingerprint": None if ready is None else ready.fingerprint,
        "num_running": 0 if stats is None else stats.num_running,
        "num_waiting": 0 if stats is None else stats.num_waiting,
    }
