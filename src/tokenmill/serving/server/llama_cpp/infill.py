"""Serve POST /infill, llama.cpp's way to fill a gap in a text; editors ask it for completions at the cursor."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.infill import ContextFile, Infill
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.fields import Int32, Int64, Label, SamplingFields, given_params
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.http.request_id import RequestId
from tokenmill.serving.server.llama_cpp.writer import CompletionWriter

MAX_FILES = 256
MAX_RESPONSE_FIELDS = 64


class InfillBody(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /infill: llama.cpp's fields, and ours where llama.cpp has other names for them.

    Attributes:
        input_prefix, input_suffix: the texts before and behind the gap.
        input_extra: other texts that matter, the least related first.
        prompt: the beginning of the filling.
        max_tokens: llama.cpp's `n_predict`; 0: the prompt is only computed, so that it is in the cache when needed.
        response_fields: paths of the fields that the reply is cut down to: "timings/prompt_n".
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ContextFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str = ""
    model: str | None = None
    max_tokens: Int32 | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_RESPONSE_FIELDS)] | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class InfillRoute:
    """The handler of /infill."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Fill one gap."""
        context = self._context
        body, call, prompts = await read_as(request, InfillBody, context.bodies, self._read)
        writer = CompletionWriter(
            model=context.reply_name(body.model),
            params=prompts[0].params,
            returns_tokens=bool(body.return_tokens),
            paths=body.response_fields,
        )
        return GenerationReply(context, call, prompts, writer, body.request_id or request.state.request_id)

    def _read(self, body: InfillBody) -> tuple[InfillBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        call = infill_call(body)
        return body, call, messages_of(call, self._context)


def infill_call(body: InfillBody) -> GenerationCall:
    """Return the call that a body asks for.

    Raises:
        InvalidRequest: it asks for a negative number of tokens.
    """
    params = given_params(body)
    if body.max_tokens is not None and body.max_tokens < 0:
        raise InvalidRequest("max_tokens (n_predict) must be 0 or more, or -1 for as many as fit", "max_tokens")
    if body.max_tokens == 0:
        params["max_tokens"] = 1  # whose logits are those of the prompt's end; it is not shown
    return GenerationCall(
        params=params,
        prompts=[Infill(body.input_prefix, body.input_suffix, body.prompt, body.input_extra or [])],
        is_score=body.max_tokens == 0,
        priority=body.priority,
        cache_salt=body.cache_salt,
        stream=body.stream,
        timeout=body.timeout,
        model=body.model,
    )
