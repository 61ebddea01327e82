"""Serve /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serving.batches.batch import Endpoint
from tokenmill.serving.batches.service import BatchService
from tokenmill.serving.batches.store import Page
from tokenmill.serving.server.http.body import read_body, read_query
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.openai.files import kept, listed
from tokenmill.serving.server.openai.upload import ExpiresAfter

Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of GET /v1/batches."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchesRoutes:
    """The handlers of /v1/batches; without a service, they refuse all."""

    def __init__(self, batches: BatchService | None, bodies: BodyBudget) -> None:
        self._batches = batches
        self._bodies = bodies

    async def create(self, request: Request) -> Response:
        """Create a batch: the lines of a file are answered within a day, beside all other requests."""
        service = kept(self._batches)
        body = await read_body(request, BatchBody, self._bodies)
        seconds = None if body.output_expires_after is None else body.output_expires_after.seconds
        owner = owner_of(request.scope)
        return json_response(await service.create(owner, body.endpoint, body.input_file_id, body.metadata, seconds))

    async def list(self, request: Request) -> Response:
        """List the batches of the caller, the newest first."""
        query = read_query(request, BatchesQuery)
        found = await kept(self._batches).batches(owner_of(request.scope), Page(query.after, query.limit))
        return json_response(listed(*found))

    async def get(self, request: Request) -> Response:
        """Show the progress of a batch."""
        batch = await kept(self._batches).batch(owner_of(request.scope), request.path_params["batch_id"])
        return json_response(batch)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; the answers that it has are kept."""
        service = kept(self._batches)
        return json_response(await service.cancel(owner_of(request.scope), request.path_params["batch_id"]))
