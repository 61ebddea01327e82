"""Serve POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.anthropic.body import MessagesBody, PromptBody, left_out, message_call
from tokenmill.serving.server.anthropic.events import MessageWriter
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.tokens import num_prompt_tokens
from tokenmill.serving.server.http.body import note_left_out, read_as
from tokenmill.serving.server.http.json_response import json_response


class MessagesRoutes:
    """The handlers of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Answer a conversation."""
        context = self._context
        model, call, prompts, unheeded = await read_as(request, MessagesBody, context.bodies, self._read)
        note_left_out(request, context.bodies, unheeded)
        label = f"msg_{request.state.request_id}"
        writer = MessageWriter(label, context.reply_name(model))
        return GenerationReply(context, call, prompts, writer, label)

    async def count_tokens(self, request: Request) -> Response:
        """Count the prompt tokens of a conversation."""
        _, _, (prompt,), unheeded = await read_as(request, PromptBody, self._context.bodies, self._read)
        note_left_out(request, self._context.bodies, unheeded)
        return json_response({"input_tokens": await num_prompt_tokens(prompt, self._context)})

    def _read(self, body: PromptBody) -> tuple[str, GenerationCall, list[GenerateText], list[str]]:
        self._context.check_count(body.messages)
        self._context.check_model(body.model)
        call = message_call(body)
        return body.model, call, messages_of(call, self._context), left_out(body)
