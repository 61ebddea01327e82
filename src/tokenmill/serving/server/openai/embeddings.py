"""Serve POST /v1/embeddings: one vector for each input, from the decoder that is served."""

from __future__ import annotations

import array
import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of, split_prompts
from tokenmill.serving.server.generation.fields import Int32, Label, TokenId
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.http.request_id import RequestId

MAX_INPUTS = 2048  # as OpenAI


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/embeddings.

    Attributes:
        pooling: take the mean of the last layer's states after the final norm, or the state of the last token.
        add_special_tokens: add the tokenizer's special tokens around a text; the default is to add them.
    """

    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Any = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    user: str | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class Embedding(msgspec.Struct):
    """One vector of length 1."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """The number of tokens in the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """The reply of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingRoute:
    """The handler of /v1/embeddings; its inputs share the queue and the steps of all other requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Turn one or more inputs into vectors."""
        context = self._context
        body, call, prompts = await read_as(request, EmbeddingBody, context.bodies, self._read)
        label = f"embd-{body.request_id or request.state.request_id}"
        writer = EmbeddingWriter(context.reply_name(body.model), body.encoding_format or "float")
        return GenerationReply(context, call, prompts, writer, label)

    def _read(self, body: EmbeddingBody) -> tuple[EmbeddingBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        if body.dimensions is not None:
            raise InvalidRequest("dimensions: this model's vectors cannot be shortened", "dimensions")
        call = GenerationCall(
            params={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            prompts=split_prompts(body.input, "input", MAX_INPUTS),
            priority=body.priority,
            cache_salt=body.cache_salt,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            pooling=body.pooling or "mean",
            add_special_tokens=body.add_special_tokens,
            timeout=body.timeout,
            model=body.model,
        )
        return body, call, messages_of(call, self._context)


class EmbeddingWriter:
    """A `ReplyWriter` for embeddings, which are never streamed."""

    def __init__(self, model: str, encoding: str) -> None:
        self._model = model
        self._encoding = encoding

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return all vectors as JSON."""
        data = [Embedding(i, _encoded(outputs[i].embedding, self._encoding)) for i in sorted(outputs)]
        tokens = usage.usage().prompt_tokens
        return msgspec.json.encode(EmbeddingList(data, self._model, EmbeddingUsage(tokens, tokens)))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""


def _encoded(raw: bytes | None, encoding: str) -> list[float] | str:
    """Return a vector from its bytes (float32, little-endian)."""
    raw = raw or b""  # the request was aborted
    return base64.b64encode(raw).decode() if encoding == "base64" else array.array("f", raw).tolist()
