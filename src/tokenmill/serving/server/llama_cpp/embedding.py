"""Serve POST /embedding: vectors for texts in llama.cpp's own form, a list of objects without counts."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.frontend.pooled_texts import embedding_params, text_inputs, texts_of
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import Int32, TokenId
from tokenmill.serving.server.generation.pooled_call import PooledCall, PooledWriter, Seconds, numbers
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as

# llama.cpp's numbers: vectors as they are, and vectors of length 1, its default.
_RAW, _EUCLIDEAN = -1, 2


class LlamaEmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /embedding: `content`, or `input`, which llama.cpp takes as well."""

    content: str | list[str | TokenId | list[TokenId]] | None = None
    input: str | list[str | TokenId | list[TokenId]] | None = None
    model: str | None = None
    embd_normalize: Int32 | None = None
    timeout: Seconds | None = None


class EmbeddingRoute:
    """The handler of /embedding."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def embedding(self, request: Request) -> Response:
        """Turn one or more texts into vectors, in llama.cpp's form."""
        call, prompts = await read_as(request, LlamaEmbeddingBody, self._context.bodies, self._read)
        return GenerationReply(self._context, call, prompts, PooledWriter(_listed), request.state.request_id)

    def _read(self, body: LlamaEmbeddingBody) -> tuple[GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        given = body.input if body.content is None else body.content
        if given is None:
            raise InvalidRequest("content is missing", "content")
        if body.embd_normalize not in (None, _RAW, _EUCLIDEAN):
            raise InvalidRequest(
                "embd_normalize must be 2 for vectors of length 1, or -1 for vectors as they are", "embd_normalize"
            )
        info = self._context.pooling
        texts = texts_of(info, text_inputs(given, "content"))
        pooling = embedding_params(info, normalizes=body.embd_normalize != _RAW)
        return PooledCall(texts=[texts], pooling=pooling, model=body.model, timeout=body.timeout).messages(
            self._context
        )


def _listed(answers: list[bytes], num_tokens: int) -> list[dict[str, object]]:
    """Return all vectors; each is in a list, as llama.cpp has it for one vector or one of each token."""
    return [{"index": index, "embedding": [numbers(answer)]} for index, answer in enumerate(answers)]
