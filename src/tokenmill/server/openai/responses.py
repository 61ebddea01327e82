"""/v1/responses: create, look again, cancel, delete. Kept in memory only, see `ResponseStore`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, NotFound, TokenMillError
from tokenmill.core.messages import TextOutput
from tokenmill.frontend.generation import Generation, merge
from tokenmill.server.context import ServerContext
from tokenmill.server.generation.call import messages_of
from tokenmill.server.generation.placement import placed
from tokenmill.server.generation.reply import GenerationReply, check_output
from tokenmill.server.generation.writer import UsageCounter
from tokenmill.server.http.body import read_body, read_query
from tokenmill.server.http.json_response import json_response
from tokenmill.server.http.middleware import tenant_of
from tokenmill.server.openai.response_events import ResponseWriter
from tokenmill.server.openai.response_store import ResponseStore, StoredResponse
from tokenmill.server.openai.responses_body import ResponsesBody, input_messages, response_call

_logger = logging.getLogger(__name__)


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How a stored response is wanted: `stream` only because clients may say that they do not want it."""

    stream: bool = False


class ResponsesRoutes:
    """Answers them."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._store = ResponseStore()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def create(self, request: Request) -> Response:
        """Answer an input."""
        body = await read_body(request, ResponsesBody, self._context.bodies)
        if body.background and (body.stream or body.store is False):
            raise InvalidRequest("background needs store, and no stream", "background")
        self._context.check_count(body.input, "input")
        earlier = self._earlier(body.previous_response_id)
        self._context.check_model(body.model)
        call = response_call(body, earlier)
        prompts = messages_of(call, self._context)
        head = self._head(body)
        messages = [*earlier, *input_messages(body.input)]

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                answer = input_messages(response["output"]) if response["output"] else []
                self._store.put(StoredResponse(response, [*messages, *answer]))

        writer = ResponseWriter(head, keep)
        if body.background:
            # Begun here, so that whatever does not let it begin is the answer to this call.
            generation = self._context.client.generate(
                placed(prompts, self._context, request.scope), head["id"], tenant=tenant_of(request.scope)
            )
            keep(head | {"status": "queued", "output": []})
            task = asyncio.ensure_future(self._run(generation, writer, body.timeout))
            self._running[head["id"]] = task
            task.add_done_callback(lambda _: self._running.pop(head["id"], None))
            return json_response(head | {"status": "queued", "output": []})
        return GenerationReply(self._context, call, prompts, writer, head["id"])

    async def get(self, request: Request) -> Response:
        """A response that was stored."""
        if read_query(request, RetrieveQuery).stream:
            raise InvalidRequest("stream: events are not stored; ask without stream", "stream")
        return json_response(self._stored(request).response)

    async def cancel(self, request: Request) -> Response:
        """End a response that runs in the background."""
        stored = self._stored(request)
        response_id = stored.response["id"]
        if stored.response["background"] is not True:
            raise InvalidRequest("only a response that was created with background can be cancelled", "response_id")
        for ids in self._context.client.find(response_id):
            self._context.client.abort(ids)
        task = self._running.get(response_id)
        if task is not None:
            await asyncio.wait([task])
        return json_response(self._stored(request).response)

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        response_id = self._stored(request).response["id"]
        self._store.drop(response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def _run(self, generation: Generation, writer: ResponseWriter, timeout: float | None) -> None:
        """Generate without a client that waits."""
        outputs: list[TextOutput] = []
        usage = UsageCounter(1)
        try:
            async with generation, asyncio.timeout(timeout):
                async for index, output in generation:
                    check_output(output)
                    usage.add(index, output)
                    outputs.append(output)
            writer.document({0: merge(outputs)}, usage)
        except (TokenMillError, TimeoutError) as error:
            writer.failure(error)
        except Exception as error:  # nobody else sees it
            _logger.exception("a response in the background failed")
            writer.failure(error)

    def _earlier(self, response_id: str | None) -> list[dict[str, Any]]:
        if response_id is None:
            return []
        stored = self._store.get(response_id)
        if stored is None or stored.response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest("previous_response_id names no response that is complete", "previous_response_id")
        return stored.messages

    def _stored(self, request: Request) -> StoredResponse:
        stored = self._store.get(request.path_params["response_id"])
        if stored is None:
            raise NotFound("no response is stored under this id", "response_id")
        return stored

    def _head(self, body: ResponsesBody) -> dict[str, Any]:
        """The fields that do not depend on the answer."""
        given = msgspec.to_builtins(body)
        shown = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "temperature")
        return {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._context.reply_name(body.model),
            "error": None,
            "incomplete_details": None,
            "background": bool(body.background),
            "store": body.store is not False,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": given["text"] or {"format": {"type": "text"}},
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **{name: given[name] for name in shown},
        }
