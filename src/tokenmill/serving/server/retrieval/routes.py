"""The routes of retrieval in one table: path, handler and body."""

from __future__ import annotations

import msgspec

from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.application import Handler
from tokenmill.serving.server.retrieval.classify import ClassifyBody, ClassifyRoutes, PoolingBody
from tokenmill.serving.server.retrieval.rerank import RerankBody, RerankRoutes
from tokenmill.serving.server.retrieval.score import ScoreBody, ScoreRoutes
from tokenmill.serving.server.retrieval.tei import PredictBody, TeiRoutes, VectorsBody

BODIES = (RerankBody, ScoreBody, ClassifyBody, PoolingBody, VectorsBody, PredictBody)


def retrieval_routes(context: ServerContext) -> dict[str, tuple[Handler, type[msgspec.Struct]]]:
    """Return the handler and the body of each path."""
    rerank, score = RerankRoutes(context).post, ScoreRoutes(context).post
    classes, tei = ClassifyRoutes(context), TeiRoutes(context)
    return {
        "/v1/rerank": (rerank, RerankBody),
        "/v2/rerank": (rerank, RerankBody),
        "/rerank": (rerank, RerankBody),
        "/v1/reranking": (rerank, RerankBody),
        "/v1/score": (score, ScoreBody),
        "/score": (score, ScoreBody),
        "/classify": (classes.classify, ClassifyBody),
        "/pooling": (classes.pool, PoolingBody),
        "/embed": (tei.embed, VectorsBody),
        "/predict": (tei.predict, PredictBody),
    }


def retrieval_handlers(context: ServerContext) -> dict[str, Handler]:
    """Return the handler of each path."""
    return {path: handler for path, (handler, _) in retrieval_routes(context).items()}
