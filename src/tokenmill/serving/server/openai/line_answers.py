"""Answer the lines of batches by the handlers of the routes that they name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.batches.lines import line_body
from tokenmill.serving.batches.runner import Reply
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.errors import error_response
from tokenmill.serving.server.http.middleware import BACKGROUND, OWNER, TENANT
from tokenmill.serving.server.openai.chat import ChatRoute
from tokenmill.serving.server.openai.completions import TextRoute
from tokenmill.serving.server.openai.embeddings import EmbeddingRoute
from tokenmill.serving.server.openai.files import kept
from tokenmill.serving.server.openai.responses import ResponsesRoutes

_logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


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
            exchange.scope["state"][OWNER] = await kept(self._context.batches).owner(batch_id)
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
