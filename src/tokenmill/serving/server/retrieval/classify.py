"""Serve POST /classify and /pooling in vLLM's form: probabilities of labels, and vectors or scores as they are."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PoolingTask
from tokenmill.serving.frontend.pooled_texts import classifying_params, embedding_params, text_inputs, texts_of
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import PositiveInt, TokenId
from tokenmill.serving.server.generation.pooled_call import PooledWriter, numbers
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.retrieval.fields import RetrievalFields
from tokenmill.serving.server.retrieval.score import ScoreList, listed


class ClassifyBody(RetrievalFields, forbid_unknown_fields=True, kw_only=True):
    """The body of /classify; `use_activation` false: logits."""

    input: str | list[str | TokenId | list[TokenId]]
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None


class PoolingBody(ClassifyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of /pooling.

    Attributes:
        task: None: what the model is for.
        normalize: of vectors; false: they keep their length.
        dimensions: of vectors, where the model's may be cut.
    """

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    normalize: bool | None = None
    dimensions: PositiveInt | None = None


class Classified(msgspec.Struct):
    """The likeliest label of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Pooled(msgspec.Struct):
    """A vector, or scores."""

    index: int
    data: list[float]
    object: str = "pooling"


class ClassifyRoutes:
    """The handlers of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def classify(self, request: Request) -> Response:
        """Classify texts, in the steps of all other requests."""
        context = self._context
        body, call, prompts = await read_as(request, ClassifyBody, context.bodies, self._read_classify)
        label = f"classify-{body.request_id or request.state.request_id}"
        assert context.pooling is not None, "the body was read for it"
        names = context.pooling.labels

        def write(answers: list[bytes], num_tokens: int) -> ScoreList:
            data = []
            for index, probs in enumerate(map(numbers, answers)):
                best = max(range(len(probs)), key=probs.__getitem__)
                data.append(Classified(index, names[best], probs, len(probs)))
            return listed(context, label, body.model, data, num_tokens)

        return GenerationReply(context, call, prompts, PooledWriter(write), label)

    async def pool(self, request: Request) -> Response:
        """Pool texts, in the steps of all other requests."""
        context = self._context
        body, call, prompts = await read_as(request, PoolingBody, context.bodies, self._read_pooling)
        label = f"pool-{body.request_id or request.state.request_id}"

        def write(answers: list[bytes], num_tokens: int) -> ScoreList:
            data = [Pooled(index, numbers(answer)) for index, answer in enumerate(answers)]
            return listed(context, label, body.model, data, num_tokens)

        return GenerationReply(context, call, prompts, PooledWriter(write), label)

    def _read_classify(self, body: ClassifyBody) -> tuple[ClassifyBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        activates = body.activation if body.use_activation is None else body.use_activation
        pooling = classifying_params(self._context.pooling, activates)
        texts = texts_of(self._context.pooling, text_inputs(body.input, "input"), None, None, *body.cut)
        texts.adds_special_tokens = body.add_special_tokens is not False
        return body, *body.pooled_call([texts], pooling).messages(self._context)

    def _read_pooling(self, body: PoolingBody) -> tuple[PoolingBody, GenerationCall, list[GenerateText]]:
        info = self._context.pooling
        if body.task in ("token_embed", "token_classify"):
            raise InvalidRequest(
                f"task {body.task} is not supported: one vector, or one list of scores, is made", "task"
            )
        own = PoolingTask.EMBED if info is None else info.task
        if (body.task or own.value) != PoolingTask.EMBED.value:
            _, call, prompts = self._read_classify(body)
            return body, call, prompts
        self._context.check_model(body.model)
        pooling = embedding_params(info, None, body.dimensions, body.normalize)
        texts = texts_of(info, text_inputs(body.input, "input"), None, None, *body.cut)
        texts.adds_special_tokens = body.add_special_tokens is not False
        return body, *body.pooled_call([texts], pooling).messages(self._context)
