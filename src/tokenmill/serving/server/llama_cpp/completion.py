"""Serve llama.cpp's own completions: POST /completion, and POST /infill, which fills a gap in a text for editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.infill import ContextFile, Infill
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, Prompt, messages_of, split_prompts
from tokenmill.serving.server.generation.fields import TokenId
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.llama_cpp.fields import CompletionFields, completion_call, shown
from tokenmill.serving.server.llama_cpp.writer import CompletionWriter

MAX_FILES = 256


class CompletionBody(CompletionFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /completion: texts or token ids to continue."""

    prompt: str | list[str | TokenId | list[TokenId]]


class InfillBody(CompletionFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /infill.

    Attributes:
        input_prefix, input_suffix: the texts before and behind the gap.
        input_extra: other texts that matter, the least related first.
        prompt: the beginning of the filling.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ContextFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str = ""


Body = TypeVar("Body", CompletionBody, InfillBody)
Read = tuple[Body, GenerationCall, list[GenerateText]]


class CompletionRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def completion(self, request: Request) -> Response:
        """Continue one or more prompts, in llama.cpp's form."""

        def read(body: CompletionBody) -> Read[CompletionBody]:
            return self._read(body, split_prompts(body.prompt, "prompt"))

        return self._reply(request, await read_as(request, CompletionBody, self._context.bodies, read))

    async def infill(self, request: Request) -> Response:
        """Fill one gap."""

        def read(body: InfillBody) -> Read[InfillBody]:
            return self._read(body, [Infill(body.input_prefix, body.input_suffix, body.prompt, body.input_extra or [])])

        return self._reply(request, await read_as(request, InfillBody, self._context.bodies, read))

    def _read(self, body: Body, prompts: Sequence[Prompt]) -> Read[Body]:
        self._context.check_model(body.model)
        call = completion_call(body, prompts)
        return body, call, messages_of(call, self._context)

    def _reply(self, request: Request, read: Read[Body]) -> Response:
        body, call, prompts = read
        writer = CompletionWriter(self._context.reply_name(body.model), prompts, shown(body))
        return GenerationReply(self._context, call, prompts, writer, body.request_id or request.state.request_id)
