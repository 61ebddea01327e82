"""Serve POST /v1/embeddings: one vector for each input, from an embedder or from any model that generates."""

from __future__ import annotations

import base64
import logging
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PoolingInfo, PoolMode
from tokenmill.serving.frontend.pooled_texts import embedding_params, text_inputs, texts_of, truncation
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import Int32, Label, PositiveInt, TokenId
from tokenmill.serving.server.generation.pooled_call import (
    PooledCall,
    PooledUsage,
    PooledWriter,
    Seconds,
    Truncation,
    numbers,
)
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.http.request_id import RequestId

_logger = logging.getLogger(__name__)


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/embeddings.

    Attributes:
        pooling: take the mean of the last layer's states after the final norm, or the state of the last token, instead
            of what the model is made for.
        dimensions: numbers of a vector, where the model's may be cut.
        normalize, normalized: false: vectors keep their length.
        prompt_name: one of the model's own prompts goes before each text.
        input_type, task: what the texts are, e.g. `query` or `document`; the model's prompt for it, if it has one.
        truncate_prompt_tokens: cut longer texts to as many tokens; -1: to what the model takes.
        add_special_tokens: add the tokenizer's special tokens around a text; the default is to add them.
    """

    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    timeout: Seconds | None = None

    def call(self, info: PoolingInfo | None) -> PooledCall:
        """Return the call for a model.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        cut, limit = truncation(self.truncate_prompt_tokens, self.truncation_side)
        normalizes = self.normalized if self.normalize is None else self.normalize
        modes = None if self.pooling is None else (PoolMode(self.pooling),)
        inputs = text_inputs(self.input, "input")
        texts = texts_of(info, inputs, self.prompt_name, self.input_type or self.task, cut, limit)
        texts.adds_special_tokens = self.add_special_tokens is not False
        return PooledCall(
            texts=[texts],
            pooling=embedding_params(info, modes, self.dimensions, normalizes),
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
        )


class Embedding(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The reply of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: PooledUsage
    object: str = "list"


class EmbeddingRoute:
    """The handler of /v1/embeddings; its inputs share the queue and the steps of all other requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._has_warned = False

    def _note_ids(self, body: EmbeddingBody) -> None:
        """Warn, once, of token ids: LangChain sends those of OpenAI's own tokenizer unless it is told not to."""
        if not self._has_warned and isinstance(body.input, list) and isinstance(body.input[0], int | list):
            self._has_warned = True
            _logger.warning(
                "/v1/embeddings was sent token ids instead of texts: they must be this model's "
                "(LangChain: check_embedding_ctx_length=False sends texts)"
            )

    async def post(self, request: Request) -> Response:
        """Turn one or more inputs into vectors."""
        context = self._context
        body, call, prompts = await read_as(request, EmbeddingBody, context.bodies, self._read)
        self._note_ids(body)
        label = f"embd-{body.request_id or request.state.request_id}"
        name, is_text = context.reply_name(body.model), body.encoding_format == "base64"

        def write(answers: list[bytes], num_tokens: int) -> EmbeddingList:
            data = [Embedding(index, _encoded(answer, is_text)) for index, answer in enumerate(answers)]
            return EmbeddingList(data, name, PooledUsage.of(num_tokens))

        return GenerationReply(context, call, prompts, PooledWriter(write), label)

    def _read(self, body: EmbeddingBody) -> tuple[EmbeddingBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        return body, *body.call(self._context.pooling).messages(self._context)


def _encoded(answer: bytes, is_text: bool) -> list[float] | str:
    """Return a vector from its bytes, as numbers or in base64."""
    return base64.b64encode(answer).decode() if is_text else numbers(answer)
