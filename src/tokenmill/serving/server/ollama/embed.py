"""Serve POST /api/embed and /api/embeddings: vectors for texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.pooling import Cut
from tokenmill.serving.frontend.pooled_texts import embedding_params, text_inputs, texts_of
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import PositiveInt
from tokenmill.serving.server.generation.pooled_call import PooledCall, UnstreamedWriter, numbers
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.ollama.names import find_model
from tokenmill.serving.server.ollama.options import check_keep_alive

_NANOSECONDS = 1_000_000  # of a millisecond


class EmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /api/embed, and of the older /api/embeddings, which has a `prompt`.

    Attributes:
        truncate: cut inputs that are too long, which is the default; else they are refused.
    """

    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: PositiveInt | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class EmbedRoutes:
    """The handlers of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def embed(self, request: Request) -> Response:
        """Turn one or more inputs into vectors."""
        return await self._answer(request, "input")

    async def embeddings(self, request: Request) -> Response:
        """Turn one prompt into a vector."""
        return await self._answer(request, "prompt")

    async def _answer(self, request: Request, field: str) -> Response:
        def read(body: EmbedBody) -> tuple[str, GenerationCall, list[GenerateText]]:
            return body.model or "", *_call(body, field, self._context).messages(self._context)

        model, call, prompts = await read_as(request, EmbedBody, self._context.bodies, read)
        writer = VectorWriter(model, is_list=field == "input")
        return GenerationReply(self._context, call, prompts, writer, request.state.request_id)


def _call(body: EmbedBody, field: str, context: ServerContext) -> PooledCall:
    check_keep_alive(body.keep_alive)
    given = getattr(body, field)
    if not given:
        raise InvalidRequest(f"{field} is missing", field)
    info = context.pooling
    texts = texts_of(info, text_inputs(given, field), cut=Cut.OFF if body.truncate is False else Cut.RIGHT)
    texts.param = field
    pooling = embedding_params(info, None, body.dimensions, None)
    return PooledCall(texts=[texts], pooling=pooling, model=find_model(context, body.model))


class VectorWriter(UnstreamedWriter):
    """Writes vectors; `is_list`: in the form of /api/embed."""

    def __init__(self, model: str, is_list: bool) -> None:
        self._model = model
        self._is_list = is_list
        self._timer = StreamTimer()

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return all vectors as JSON.

        Raises:
            Unavailable: see `answers`.
        """
        vectors = [numbers(answer) for answer in self.answers(outputs)]
        if not self._is_list:
            return msgspec.json.encode({"embedding": vectors[0]})
        for output in outputs.values():
            self._timer.note(output)
        duration = round(self._timer.timings(usage).prompt_ms * _NANOSECONDS)
        counts = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": usage.usage().prompt_tokens}
        return msgspec.json.encode({"model": self._model, "embeddings": vectors} | counts)
