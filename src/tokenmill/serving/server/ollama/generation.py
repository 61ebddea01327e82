"""Serve POST /api/chat and /api/generate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.reply import JSON_LINES, GenerationReply
from tokenmill.serving.server.http.body import note_left_out, read_as
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.ollama.body import OllamaChatBody, OllamaGenerateBody, chat_call, generate_call
from tokenmill.serving.server.ollama.names import find_model
from tokenmill.serving.server.ollama.options import check_keep_alive, unheeded
from tokenmill.serving.server.ollama.writer import LineWriter, now

Body = OllamaChatBody | OllamaGenerateBody
Prepared = tuple[GenerationCall, list[GenerateText]]


class GenerationRoutes:
    """The handlers of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, in lines of JSON unless `stream` is false."""
        body, prepared = await read_as(request, OllamaChatBody, self._context.bodies, self._read_chat)
        return self._answer(request, body, prepared)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, go on with a raw one, or fill the gap in front of a suffix."""
        body, prepared = await read_as(request, OllamaGenerateBody, self._context.bodies, self._read_prompt)
        return self._answer(request, body, prepared)

    def _answer(
        self, request: Request, body: OllamaChatBody | OllamaGenerateBody, prepared: Prepared | None
    ) -> Response:
        note_left_out(request, self._context.bodies, unheeded(body.options))
        shown, is_chat = body.model or "", isinstance(body, OllamaChatBody)
        if prepared is None:
            return json_response(_loaded(shown, is_chat))
        call, prompts = prepared
        writer = LineWriter(shown, is_chat)
        return GenerationReply(self._context, call, prompts, writer, request.state.request_id, stream_format=JSON_LINES)

    def _read_chat(self, body: OllamaChatBody) -> tuple[OllamaChatBody, Prepared | None]:
        name = find_model(self._context, body.model)
        self._context.check_count(body.messages)
        return body, None if _is_load(body) else self._prepared(chat_call(body, name, self._context))

    def _read_prompt(self, body: OllamaGenerateBody) -> tuple[OllamaGenerateBody, Prepared | None]:
        name = find_model(self._context, body.model)
        return body, None if _is_load(body) else self._prepared(generate_call(body, name, self._context))

    def _prepared(self, call: GenerationCall) -> Prepared:
        return call, messages_of(call, self._context)


def _is_load(body: Body) -> bool:
    """Return True if a body asks for nothing but that the model be loaded, which it is.

    Raises:
        InvalidRequest: it asks that the model be unloaded.
    """
    check_keep_alive(body.keep_alive)
    if body.is_empty and body.keep_alive in (0, "0", "0s"):
        raise InvalidRequest("keep_alive 0: this server keeps its model as long as it runs", "keep_alive")
    return body.is_empty


def _loaded(model: str, is_chat: bool) -> dict[str, object]:
    """Return the reply to a body that asks for nothing."""
    part = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now(), **part, "done": True, "done_reason": "load"}
