"""Serve POST /embed and /predict in the form of text-embeddings-inference (TEI), whose errors have a type of their own.

Its /rerank is at `rerank`.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PooledTexts, PoolingInfo, PoolInput
from tokenmill.serving.frontend.pooled_texts import (
    check_count,
    classifying_params,
    compared_texts,
    embedding_params,
    text_inputs,
    texts_of,
)
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import PositiveInt, TokenId
from tokenmill.serving.server.generation.pooled_call import PooledWriter, numbers
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.retrieval.fields import RetrievalFields


class VectorsBody(RetrievalFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /embed; fields as of /v1/embeddings."""

    inputs: str | list[str | TokenId | list[TokenId]]
    normalize: bool | None = None
    dimensions: PositiveInt | None = None
    prompt_name: str | None = None


class PredictBody(RetrievalFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /predict.

    Attributes:
        inputs: a text; a list of two texts, which are one pair; or a list of lists of one text or two.
        raw_scores: logits.
    """

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None


class Prediction(msgspec.Struct):
    """The score of a label."""

    score: float
    label: str


class TeiRoutes:
    """The handlers of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors."""
        context = self._context
        call, prompts = await read_as(request, VectorsBody, context.bodies, self._read_vectors)
        writer = PooledWriter(lambda answers, _: [numbers(answer) for answer in answers])
        return GenerationReply(context, call, prompts, writer, request.state.request_id)

    async def predict(self, request: Request) -> Response:
        """Classify texts or pairs, best label first."""
        context = self._context
        is_one, call, prompts = await read_as(request, PredictBody, context.bodies, self._read_predict)
        assert context.pooling is not None, "the body was read for it"
        labels = context.pooling.labels

        def write(answers: list[bytes], num_tokens: int) -> list[Prediction] | list[list[Prediction]]:
            found = []
            for scores in map(numbers, answers):
                each = [Prediction(score, label) for score, label in zip(scores, labels, strict=True)]
                found.append(sorted(each, key=lambda one: -one.score))
            return found[0] if is_one else found

        return GenerationReply(context, call, prompts, PooledWriter(write), request.state.request_id)

    def _read_vectors(self, body: VectorsBody) -> tuple[GenerationCall, list[GenerateText]]:
        info = self._context.pooling
        self._context.check_model(body.model)
        pooling = embedding_params(info, None, body.dimensions, body.normalize)
        texts = texts_of(info, text_inputs(body.inputs, "inputs"), body.prompt_name, None, *body.cut)
        texts.param = "inputs"
        return body.pooled_call([texts], pooling).messages(self._context)

    def _read_predict(self, body: PredictBody) -> tuple[bool, GenerationCall, list[GenerateText]]:
        info = self._context.pooling
        self._context.check_model(body.model)
        pooling = classifying_params(info, not body.raw_scores)
        assert info is not None, "others have no labels"
        is_one, texts = _predicted(body, info)
        return is_one, *body.pooled_call([texts], pooling).messages(self._context)


def _predicted(body: PredictBody, info: PoolingInfo) -> tuple[bool, PooledTexts]:
    """Return the texts or pairs of a body, and whether there is only one, which is answered without a list."""
    given = body.inputs
    if isinstance(given, str):
        entries, is_one = [[given]], True
    else:
        flat = [one for one in given if isinstance(one, str)]
        is_one = bool(flat)
        if flat and len(flat) != len(given):
            raise InvalidRequest("inputs mixes texts and lists", "inputs")
        entries = [flat] if flat else [one for one in given if isinstance(one, list)]
    check_count(len(entries), "inputs")
    lengths = {len(entry) for entry in entries}
    if lengths == {2}:
        first, second = ([entry[side] for entry in entries] for side in (0, 1))
        (texts,) = compared_texts(info, first, second, None, *body.cut, "inputs")
        return is_one, texts
    if lengths != {1}:
        raise InvalidRequest("inputs: each entry is one text, or each is a pair", "inputs")
    texts = texts_of(info, [PoolInput(entry[0]) for entry in entries], None, None, *body.cut)
    texts.param = "inputs"
    return is_one, texts
