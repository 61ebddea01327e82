"""Serve what is stored of /v1/responses: retrieve and delete. Knows no model."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, NotFound
from tokenmill.serving.server.http.body import read_query
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.response_files import StoredResponse
from tokenmill.serving.server.response_store import ResponseStore


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of GET /v1/responses/{id}; `stream` exists because clients may send it as false."""

    stream: bool = False


class StoredResponsesRoutes:
    """The handlers of /v1/responses/{response_id}."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, request: Request) -> Response:
        """Return a stored response."""
        if read_query(request, RetrieveQuery).stream:
            raise InvalidRequest("stream: events are not stored; ask without stream", "stream")
        return json_response((await stored_of(request, self._store)).response)

    async def delete(self, request: Request) -> Response:
        """Delete a stored response."""
        response_id = (await stored_of(request, self._store)).response["id"]
        await self._store.drop(owner_of(request.scope), response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


async def stored_of(request: Request, store: ResponseStore) -> StoredResponse:
    """Return the response that the path of a request names.

    Raises:
        NotFound: its key has none of this id.
    """
    stored = await store.get(owner_of(request.scope), request.path_params["response_id"])
    if stored is None:
        raise NotFound("no response is stored under this id", "response_id")
    return stored
