"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import EncodeText
from tokenmill.frontend.chat_messages import check_depth, normalize_messages
from tokenmill.server.context import ServerContext
from tokenmill.server.generation.call import template_kwargs
from tokenmill.server.generation.fields import TokenId
from tokenmill.server.http.body import read_body
from tokenmill.server.http.json_response import json_response


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, or a conversation that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, omit_defaults=True):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[TokenId]
    model: str | None = None


class Text(msgspec.Struct):
    """The reply of /detokenize."""

    prompt: str


class TokenRoutes:
    """Answers both."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def tokenize(self, request: Request) -> Response:
        """Text to token ids."""
        body = await read_body(request, TokenizeBody, self._context.bodies)
        self._context.check_model(body.model)
        self._context.check_count(body.messages)
        encoded = await self._context.client.encode(_encode_message(body))
        strings = encoded.tokens if body.return_token_strs else None
        max_model_len = self._context.ready.max_model_len
        return json_response(Tokens(len(encoded.token_ids), max_model_len, encoded.token_ids, strings))

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text."""
        body = await read_body(request, DetokenizeBody, self._context.bodies)
        self._context.check_model(body.model)
        return json_response(Text(await self._context.client.decode(body.tokens)))


def _encode_message(body: TokenizeBody) -> EncodeText:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    kwargs = template_kwargs(
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    check_depth(body.tools, "tools")
    is_chat = body.messages is not None
    return EncodeText(
        id="",
        text=body.prompt,
        messages=normalize_messages(body.messages) if is_chat else None,
        tools=body.tools,
        template_kwargs=kwargs,
        add_special_tokens=not is_chat if body.add_special_tokens is None else body.add_special_tokens,
    )
