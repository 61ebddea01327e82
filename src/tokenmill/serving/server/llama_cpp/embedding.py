"""Serve POST /embedding: vectors for texts in llama.cpp's own form, a list of objects without counts."""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of, split_prompts
from tokenmill.serving.server.generation.fields import Int32, TokenId
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.writer import PING, UsageCounter
from tokenmill.serving.server.http.body import read_as

MAX_INPUTS = 2048
# llama.cpp's number for vectors of length 1, its default.
_EUCLIDEAN = 2


class LlamaEmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /embedding: `content`, or `input`, which llama.cpp takes as well."""

    content: str | list[str | TokenId | list[TokenId]] | None = None
    input: str | list[str | TokenId | list[TokenId]] | None = None
    model: str | None = None
    embd_normalize: Int32 | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class EmbeddingRoute:
    """The handler of /embedding."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def embedding(self, request: Request) -> Response:
        """Turn one or more texts into vectors of length 1, in llama.cpp's form."""
        call, prompts = await read_as(request, LlamaEmbeddingBody, self._context.bodies, self._read)
        return GenerationReply(self._context, call, prompts, VectorListWriter(), request.state.request_id)

    def _read(self, body: LlamaEmbeddingBody) -> tuple[GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        given = body.input if body.content is None else body.content
        if given is None:
            raise InvalidRequest("content is missing", "content")
        if body.embd_normalize not in (None, _EUCLIDEAN):
            raise InvalidRequest("embd_normalize must be 2: vectors have length 1", "embd_normalize")
        call = GenerationCall(
            params={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            prompts=split_prompts(given, "content", MAX_INPUTS),
            pooling="mean",
            timeout=body.timeout,
            model=body.model,
        )
        return call, messages_of(call, self._context)


class VectorListWriter:
    """A `ReplyWriter` for vectors, which are never streamed."""

    ping = PING

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return all vectors as JSON; each is in a list, as llama.cpp has it for one vector or one of each token."""
        vectors = {index: array.array("f", outputs[index].embedding or b"").tolist() for index in sorted(outputs)}
        return msgspec.json.encode([{"index": index, "embedding": [vector]} for index, vector in vectors.items()])

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""
