"""Serve POST /tokenize and POST /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.text_queries import Encoded, EncodeText
from tokenmill.serving.frontend.chat_messages import check_depth, normalize_messages
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import template_kwargs
from tokenmill.serving.server.generation.fields import TokenId, Tools
from tokenmill.serving.server.http.body import read_as, read_body
from tokenmill.serving.server.http.json_response import json_response


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, or a conversation that the chat template turns into a text.

    Attributes:
        content, add_special, with_pieces: a text, in llama.cpp's words, which is answered in its form: special tokens
            are added where that is said.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None


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
    """The reply of /detokenize; `content` is llama.cpp's name for the text."""

    prompt: str
    content: str


class TokenRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def tokenize(self, request: Request) -> Response:
        """Turn text into token ids."""
        message, body = await read_as(request, TokenizeBody, self._context.bodies, self._read)
        encoded = await self._context.client.encode(message)
        if body.content is not None:
            return json_response({"tokens": _pieces(encoded) if body.with_pieces else encoded.token_ids})
        strings = encoded.tokens if body.return_token_strs else None
        max_model_len = self._context.ready.max_model_len
        return json_response(Tokens(len(encoded.token_ids), max_model_len, encoded.token_ids, strings))

    def _read(self, body: TokenizeBody) -> tuple[EncodeText, TokenizeBody]:
        self._context.check_model(body.model)
        self._context.check_count(body.messages)
        message = _encode_message(body)
        if message.messages is not None:
            kwargs = self._context.parsers.template_kwargs(message.template_kwargs)
            message = msgspec.structs.replace(message, template_kwargs=kwargs)
        return message, body

    async def info(self, _request: Request) -> Response:
        """Show tokenizer_config.json with the chat template in use."""
        return json_response(self._context.tokenizer_info())

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        body = await read_body(request, DetokenizeBody, self._context.bodies)
        self._context.check_model(body.model)
        text = await self._context.client.decode(body.tokens)
        return json_response(Text(text, text))


async def num_prompt_tokens(prompt: GenerateText, context: ServerContext) -> int:
    """Return the number of tokens of a chat's prompt, with its tools.

    Raises:
        InvalidRequest: the chat cannot be encoded.
    """
    message = EncodeText(
        id="",
        messages=prompt.messages,
        tools=prompt.tools,
        template_kwargs=prompt.template_kwargs,
        add_special_tokens=False,
    )
    return len((await context.client.encode(message)).token_ids)


def tokenizer_info(folder: Path, template_file: str | None) -> dict[str, Any]:
    """Return what clients need to render chats: special tokens as texts and the chat template, without paths.

    Raises:
        InvalidCheckpoint: a file of the folder cannot be read.
    """
    from tokenmill.serving.frontend.chat_template import load_chat_template  # brings jinja2, which few starts need

    config = {name: _text_of(value) for name, value in read_json(folder, "tokenizer_config.json").items()}
    template = load_chat_template(folder, {}, template_file)
    shown = {name: value for name, value in config.items() if not name.endswith(("_file", "_path"))}
    own = {"tokenizer_class": "PreTrainedTokenizerFast", **shown}
    return own if template is None else own | {"chat_template": template.source}


def _text_of(value: Any) -> Any:
    """Return the text of a special token, which may be an object that has the text as its content."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _pieces(encoded: Encoded) -> list[dict[str, Any]]:
    """Return tokens with their texts, in llama.cpp's form; bytes that are no text are numbers there."""
    return [{"id": one, "piece": _piece(raw)} for one, raw in zip(encoded.token_ids, encoded.pieces, strict=True)]


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _encode_message(body: TokenizeBody) -> EncodeText:
    if body.content is not None:
        if body.parse_special is False:
            raise InvalidRequest("parse_special: marks in a text are always read as special tokens", "parse_special")
        wants: Literal["pieces", "ids"] = "pieces" if body.with_pieces else "ids"
        return EncodeText(id="", text=body.content, add_special_tokens=bool(body.add_special), wants=wants)
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
