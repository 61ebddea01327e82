"""Serve POST /rerank, /v1/rerank, /v2/rerank and /v1/reranking: documents in the order in which they answer a query.

One body and one reply for Jina's, Cohere's, vLLM's, llama.cpp's and infinity's clients, who read each what they know;
where the field is called `texts`, reply and names are those of text-embeddings-inference (TEI). Scores are
probabilities or cosines unless raw ones are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import Cut, PoolingInfo
from tokenmill.serving.frontend.pooled_texts import check_count, compared_scores, compared_texts, comparing_params
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import PositiveInt
from tokenmill.serving.server.generation.pooled_call import PooledCall, PooledUsage, PooledWriter
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.retrieval.fields import RetrievalFields

COHERE_2 = "/v2/rerank"
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Document = str | dict[str, Any]


class RerankBody(RetrievalFields, forbid_unknown_fields=True, kw_only=True):
    """The body of all these routes.

    Attributes:
        documents: texts, or objects with a `text`, or with the fields that `rank_fields` names.
        texts: TEI's name for them.
        top_n, top_k: as many of the best; 0: all.
        return_documents: whether results have their documents; by default they have, but not at /v2/rerank.
            return_text: TEI's name for it.
        raw_scores, use_activation: true, and false: a reranker's logits.
        instruction: what the model judges by, where its template has a place for that.
        max_tokens_per_doc, max_chunks_per_doc: the first lets documents be cut; the second asks for nothing.
    """

    query: str
    documents: list[Document] | None = None
    texts: list[str] | None = None
    top_n: Count | None = None
    top_k: Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    use_activation: bool | None = None
    instruction: str | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: PositiveInt | None = None
    max_chunks_per_doc: PositiveInt | None = None

    @property
    def is_tei(self) -> bool:
        """True for a body of text-embeddings-inference."""
        return self.documents is None

    @property
    def document_texts(self) -> list[str]:
        """The text of each document.

        Raises:
            InvalidRequest: there are none, too many, or one has no text.
        """
        param = "texts" if self.is_tei else "documents"
        if self.documents is None and self.texts is None:
            raise InvalidRequest("documents is missing", "documents")
        if self.documents is not None and self.texts is not None:
            raise InvalidRequest("documents and texts are two names of one field: give one", "texts")
        given: Sequence[Document] = (self.texts if self.documents is None else self.documents) or ()
        check_count(len(given), param)
        return [self._text(one, number) for number, one in enumerate(given)]

    def _text(self, document: Document, number: int) -> str:
        if isinstance(document, str):
            return document
        names = self.rank_fields or ["text"]
        values = [document.get(name) for name in names if document.get(name) is not None]
        if not values or not all(isinstance(value, str) for value in values):
            raise InvalidRequest(f"documents[{number}] has no text in {', '.join(names)}", "documents")
        return "\n".join(map(str, values))

    @property
    def activates(self) -> bool:
        """False if logits are asked for."""
        return not self.raw_scores and self.use_activation is not False


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document and its score; `index`: its place among those given."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RankedText(msgspec.Struct, omit_defaults=True):
    """A text and its score, in TEI's form."""

    index: int
    score: float
    text: str | None = None


class RerankReply(msgspec.Struct):
    """The reply, best first, equals in their order: what each of the APIs has, under its name."""

    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]
    meta: dict[str, Any]
    object: str = "list"


class RerankRoutes:
    """The handler of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Score all documents, in the steps of all other requests."""
        context, path = self._context, request.scope["path"]
        body, documents, call, prompts = await read_as(request, RerankBody, context.bodies, self._read)
        label = f"rerank-{body.request_id or request.state.request_id}"
        info = context.pooling
        assert info is not None, "the body was read for it"

        def write(answers: list[bytes], num_tokens: int) -> RerankReply | list[RankedText]:
            scores = compared_scores(info, len(documents), answers)
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            if body.is_tei:
                texts = documents if body.return_text else [None] * len(documents)
                return [RankedText(index, scores[index], texts[index]) for index in order]
            most = next((count for count in (body.top_n, body.top_k) if count is not None), None)
            if most is not None and (most or path.endswith("/reranking")):
                order = order[:most]  # llama.cpp's 0 is none
            is_shown = not path.endswith(COHERE_2) if body.return_documents is None else body.return_documents
            shown = [{"text": document} for document in documents] if is_shown else [None] * len(documents)
            results = [Ranked(index, scores[index], shown[index]) for index in order]
            meta = {"api_version": {"version": "2" if path.endswith(COHERE_2) else "1"}}
            return RerankReply(label, context.reply_name(body.model), PooledUsage.of(num_tokens), results, meta)

        return GenerationReply(context, call, prompts, PooledWriter(write), label)

    def _read(self, body: RerankBody) -> tuple[RerankBody, list[str], GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        documents = body.document_texts
        return body, documents, *rerank_call(body, documents, self._context.pooling).messages(self._context)


def rerank_call(body: RerankBody, documents: list[str], info: PoolingInfo | None) -> PooledCall:
    """Return the call that scores documents for a query.

    Raises:
        InvalidRequest: the model does not compare texts, or a field is at fault.
    """
    pooling = comparing_params(info, body.activates)
    assert info is not None, "others do not compare"
    cut, limit = body.cut
    if cut is None and body.max_tokens_per_doc is not None:
        cut = Cut.RIGHT
    param = "texts" if body.is_tei else "documents"
    return body.pooled_call(compared_texts(info, [body.query], documents, body.instruction, cut, limit, param), pooling)
