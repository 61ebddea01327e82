"""Serve /v1/responses: create, retrieve, cancel, delete. `ResponseStore` says where they are kept."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, TokenMillError
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.serving.frontend.chat_messages import check_size
from tokenmill.serving.frontend.generation import Generation, merge
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.placement import placed
from tokenmill.serving.server.generation.reply import GenerationReply, caller_of, check_output
from tokenmill.serving.server.generation.tokens import num_prompt_tokens
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.http.body import note_left_out, read_call
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.openai.response_events import ResponseWriter
from tokenmill.serving.server.openai.response_tools import ResponseTools, read_tools
from tokenmill.serving.server.openai.response_truncation import shortened
from tokenmill.serving.server.openai.responses_body import (
    ENCRYPTED,
    ResponsesBody,
    input_messages,
    left_out,
    response_call,
)
from tokenmill.serving.server.openai.stored_responses import stored_of
from tokenmill.serving.server.response_files import StoredResponse

_logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 64 << 10


class _Asked(msgspec.Struct, frozen=True):
    """A body's call; `head`: the fields of its response, `messages`: the chat without instructions."""

    call: GenerationCall
    prompts: list[GenerateText]
    head: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: ResponseTools


class ResponsesRoutes:
    """The handlers of /v1/responses."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._store = context.responses

    async def create(self, request: Request) -> Response:
        """Answer an input."""
        context, owner = self._context, owner_of(request.scope)
        body, num_bytes = await read_call(request, ResponsesBody, context.bodies)
        if body.background and (body.stream or body.store is False):
            raise InvalidRequest("background needs store, and no stream", "background")
        earlier = await self._earlier(owner, body.previous_response_id)
        num_bytes += earlier.num_bytes
        asked = await context.bodies.threads.run(num_bytes, lambda: self._read(body, earlier.messages))
        note_left_out(request, context.bodies, left_out(body, asked.tools))
        call, prompts, head = asked.call, asked.prompts, asked.head
        if body.truncation == "auto":
            call, prompts, dropped = await shortened(call, prompts, context, num_bytes)
            head |= {"dropped_turns": dropped} if dropped else {}

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                answer = input_messages(response["output"]) if response["output"] else []
                size = num_bytes + len(msgspec.json.encode(response["output"]))
                self._store.put(owner, StoredResponse(response, [*asked.messages, *answer], size))

        writer = ResponseWriter(head, keep, asked.tools.names, ENCRYPTED in (body.include or ()))
        if not body.background:
            return GenerationReply(context, call, prompts, writer, head["id"])
        # Begun here, so that whatever does not let it begin is the answer to this call.
        placement = placed(await context.media.fetched(prompts), context, request.scope, call)
        generation = context.client.generate(placement, caller_of(request.scope, head["id"]))
        keep(head | {"status": "queued", "output": []})
        task = self._store.tasks[head["id"]] = asyncio.ensure_future(self._run(generation, writer, body.timeout))
        task.add_done_callback(lambda _: self._store.tasks.pop(head["id"], None))
        return json_response(head | {"status": "queued", "output": []})

    async def input_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of an input."""
        context = self._context
        body, num_bytes = await read_call(request, ResponsesBody, context.bodies)
        earlier = await self._earlier(owner_of(request.scope), body.previous_response_id)
        asked = await context.bodies.threads.run(
            num_bytes + earlier.num_bytes, lambda: self._read(body, earlier.messages)
        )
        note_left_out(request, context.bodies, left_out(body, asked.tools))
        count = await num_prompt_tokens(asked.prompts[0], context)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response that runs in the background."""
        stored = await stored_of(request, self._store)
        response_id = stored.response["id"]
        if stored.response["background"] is not True:
            raise InvalidRequest("only a response that was created with background can be cancelled", "response_id")
        for ids in self._context.client.find([response_id], owner_of(request.scope))[response_id]:
            self._context.client.abort(ids)
        task = self._store.tasks.get(response_id)
        if task is not None:
            await asyncio.wait([task])
        return json_response((await stored_of(request, self._store)).response)

    async def _run(self, generation: Generation, writer: ResponseWriter, timeout: float | None) -> None:
        """Generate in the background, without a waiting client."""
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
        except Exception as error:  # no caller sees it
            _logger.exception("a response in the background failed")
            writer.failure(error)

    def _read(self, body: ResponsesBody, earlier: list[dict[str, Any]]) -> _Asked:
        self._context.check_count(body.input, "input")
        self._context.check_model(body.model)
        check_size(body.metadata, "metadata", MAX_METADATA_BYTES)
        tools = read_tools(body.tools)
        call = response_call(body, tools, earlier)
        messages = [*earlier, *input_messages(body.input)]
        return _Asked(call, messages_of(call, self._context), self._head(body), messages, tools)

    async def _earlier(self, owner: str, response_id: str | None) -> StoredResponse:
        if response_id is None:
            return StoredResponse({}, [], 0)
        stored = await self._store.get(owner, response_id)
        if stored is None or stored.response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest("previous_response_id names no response that is complete", "previous_response_id")
        return stored

    def _head(self, body: ResponsesBody) -> dict[str, Any]:
        """Return the fields that do not depend on the answer."""
        shown = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_logprobs")
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
            "text": msgspec.to_builtins(body.text) or {"format": {"type": "text"}},
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "reasoning": msgspec.to_builtins(body.reasoning),
            **{name: getattr(body, name) for name in shown},
        }
