"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.messages import EncodeText
from tokenmill.server.body import read_body
from tokenmill.server.chat import ChatRoute
from tokenmill.server.context import ServerContext
from tokenmill.server.json_response import json_response
from tokenmill.server.messages_body import MessagesBody, PromptBody, chat_body
from tokenmill.server.messages_format import MessageWriter
from tokenmill.server.reply import GenerationReply
from tokenmill.server.reply_format import StreamPlan


class MessagesRoutes:
    """Answers both."""

    def __init__(self, context: ServerContext, chat: ChatRoute) -> None:
        self._context = context
        self._chat = chat

    async def post(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, MessagesBody)
        self._context.check_count(body.messages)
        chat = chat_body(body)
        prompt = self._chat.prompt(chat)
        plan = StreamPlan(stream=bool(body.stream), include_usage=False, continuous_usage=False, timeout=None)
        label = f"msg_{request.state.request_id}"
        writer = MessageWriter(label, self._context.model_name, self._chat.reader(chat))
        return GenerationReply(self._context, [prompt], writer, label, plan)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        body = await read_body(request, PromptBody)
        self._context.check_count(body.messages)
        prompt = self._chat.prompt(chat_body(body))
        encoded = await self._context.client.encode(
            EncodeText(
                id="",
                messages=prompt.messages,
                tools=prompt.tools,
                template_kwargs=prompt.template_kwargs,
                add_special_tokens=False,
            )
        )
        return json_response({"input_tokens": len(encoded.token_ids)})
