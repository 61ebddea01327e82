"""Serve /v1/batches, and answer the lines of a batch by the handlers of the routes that they name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.batches.batch import Endpoint
from tokenmill.serving.batches.lines import line_body
from tokenmill.serving.batches.runner import Reply
from tokenmill.serving.batches.store import Page
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.body import read_body, read_query
from tokenmill.serving.server.http.errors import error_response
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import BACKGROUND, OWNER, TENANT, owner_of
from tokenmill.serving.server.openai.chat import ChatRoute
from tokenmill.serving.server.openai.completions import TextRoute
from tokenmill.serving.server.openai.embeddings import EmbeddingRoute
from tokenmill.serving.server.openai.files import batches_of, listed
from tokenmill.serving.server.openai.responses import ResponsesRoutes
from tokenmill.serving.server.openai.upload import ExpiresAfter

_logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
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
    """The handlers of /v1/batches."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Create a batch: the lines of a file are answered within a day, beside all other requests."""
        service = batches_of(self._context)
        body = await read_body(request, BatchBody, self._context.bodies)
        seconds = None if body.output_expires_after is None else body.output_expires_after.seconds
        owner = owner_of(request.scope)
        return json_response(await service.create(owner, body.endpoint, body.input_file_id, body.metadata, seconds))

    async def list(self, request: Request) -> Response:
        """List the batches of the caller, the newest first."""
        query = read_query(request, BatchesQuery)
        found = await batches_of(self._context).batches(owner_of(request.scope), Page(query.after, query.limit))
        return json_response(listed(*found))

    async def get(self, request: Request) -> Response:
        """Show the progress of a batch."""
        batch = await batches_of(self._context).batch(owner_of(request.scope), request.path_params["batch_id"])
        return json_response(batch)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; the answers that it has are kept."""
        service = batches_of(self._context)
        return json_response(await service.cancel(owner_of(request.scope), request.path_params["batch_id"]))


class LineAnswers:
    """Answers lines as their routes answer HTTP: by the same handlers, with the same checks, errors and replies.

    The handlers get a request that was made here, without the middleware: the keys and origins of the client that made
    the batch were checked then, and it owns the responses that are stored.
    """

    def __init__(self, context: ServerContext, others: Mapping[str, Handler]) -> None:
        """`others`: the handlers of endpoints that are not OpenAI's."""
        self._context = context
        self._handlers: dict[str, Handler] = {
            **others,
            "/v1/chat/completions": ChatRoute(context).post,
            "/v1/completions": TextRoute(context).post,
            "/v1/embeddings": EmbeddingRoute(context).post,
            "/v1/responses": ResponsesRoutes(context).create,
        }

    async def answer(self, endpoint: str, batch_id: str, request_id: str, line: bytes) -> Reply:
        """Answer one line of a batch with the handler of its endpoint."""
        state = {"request_id": request_id, TENANT: batch_id, BACKGROUND: True}
        scope: Scope = {"type": "http", "method": "POST", "path": endpoint, "query_string": b"", "headers": []}
        exchange = _Exchange({**scope, "state": state})
        response: Response
        try:
            exchange.scope["state"][OWNER] = await batches_of(self._context).owner(batch_id)
            exchange.body = line_body(line, batch_id)
            response = await self._handlers[endpoint](Request(exchange.scope, exchange.receive))
        except Exception as error:
            if not isinstance(error, TokenMillError):
                _logger.exception("a line of a batch failed")
            response = error_response(error)
        await response(exchange.scope, exchange.receive, exchange.send)
        return Reply(exchange.status, bytes(exchange.sent))


class _Exchange:
    """One request and its reply without a connection; its client never leaves."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.body: bytes | None = b""
        self.status = 0
        self.sent = bytearray()

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.get_running_loop().create_future()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.sent += message.get("body", b"")
