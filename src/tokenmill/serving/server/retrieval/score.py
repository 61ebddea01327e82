"""Serve POST /score and /v1/score, vLLM's way to compare texts: one with many, or each with the one beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.frontend.pooled_texts import check_count, compared_scores, compared_texts, comparing_params
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.pooled_call import PooledUsage, PooledWriter
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.retrieval.fields import RetrievalFields

Texts = str | list[str]
# The names of the two sides, which have changed from version to version.
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreBody(RetrievalFields, forbid_unknown_fields=True, kw_only=True):
    """The body of both routes: one of the pairs of names.

    Attributes:
        use_activation: false: a reranker's logits.
        instruction: what the model judges by, where its template has a place for that.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None
    instruction: str | None = None

    def sides(self) -> tuple[list[str], list[str], str]:
        """Return the texts of both sides, and the name of the second.

        Raises:
            InvalidRequest: there are not two that belong together, or as many of both.
        """
        names = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        for first, second in _PAIRS:
            if names == {first, second}:
                one, other = _listed(getattr(self, first)), _listed(getattr(self, second))
                check_count(len(one), first)
                check_count(len(other), second)
                if len(one) not in (1, len(other)):
                    raise InvalidRequest(
                        f"{len(one)} texts in {first} and {len(other)} in {second}: as many, or 1", first
                    )
                return one, other, second
        raise InvalidRequest("two sides are compared: text_1 and text_2, or queries and documents", "text_1")


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Score(msgspec.Struct):
    """One comparison."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    """The reply."""

    id: str
    created: int
    model: str
    data: Sequence[Any]
    usage: PooledUsage
    object: str = "list"


class ScoreRoutes:
    """The handler of both routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Compare texts, in the steps of all other requests."""
        context = self._context
        body, count, call, prompts = await read_as(request, ScoreBody, context.bodies, self._read)
        label = f"score-{body.request_id or request.state.request_id}"
        info = context.pooling
        assert info is not None, "the body was read for it"

        def write(answers: list[bytes], num_tokens: int) -> ScoreList:
            scores = [Score(index, score) for index, score in enumerate(compared_scores(info, count, answers))]
            return listed(context, label, body.model, scores, num_tokens)

        return GenerationReply(context, call, prompts, PooledWriter(write), label)

    def _read(self, body: ScoreBody) -> tuple[ScoreBody, int, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        info = self._context.pooling
        first, second, param = body.sides()
        pooling = comparing_params(info, body.use_activation)
        assert info is not None, "others do not compare"
        texts = compared_texts(info, first, second, body.instruction, *body.cut, param)
        return body, len(second), *body.pooled_call(texts, pooling).messages(self._context)


def listed(context: ServerContext, label: str, model: str | None, data: Sequence[Any], num_tokens: int) -> ScoreList:
    """Return a reply in vLLM's form."""
    return ScoreList(label, int(time.time()), context.reply_name(model), data, PooledUsage.of(num_tokens))
