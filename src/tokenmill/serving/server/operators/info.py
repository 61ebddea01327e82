"""Serve the routes that describe the server: models, health, version, metrics."""

from __future__ import annotations

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import EngineDead
from tokenmill.core.version import VERSION
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.errors import error_response
from tokenmill.serving.server.http.json_response import json_response


class ModelCard(msgspec.Struct):
    """One entry of /v1/models; an adapter's parent is the model that it changes.

    Attributes:
        task: generate, transcribe, embed, rerank or classify.
    """

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "tokenmill"
    parent: str | msgspec.UnsetType = msgspec.UNSET
    task: str = "generate"


class ModelList(msgspec.Struct):
    """The reply of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class InfoRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def models(self, _request: Request) -> Response:
        """List the models and adapters of this server."""
        names = [*self._context.names, *(adapter.name for adapter in self._context.adapters)]
        return json_response(ModelList([self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """Show one model."""
        name = request.path_params["model"]
        self._context.check_model(name)
        return json_response(self._card(name))

    async def health(self, _request: Request) -> Response:
        """Return 200 while all engines make progress, else 503."""
        trouble = self._context.trouble()
        return json_response({"status": "ok"}) if trouble is None else error_response(EngineDead(trouble))

    async def livez(self, _request: Request) -> Response:
        """Return 200: the process that serves HTTP lives. What Kubernetes restarts a server by."""
        return Response(status_code=200)

    async def readyz(self, request: Request) -> Response:
        """Answer as /health does: what Kubernetes sends a server requests by."""
        return await self.health(request)

    async def ping(self, _request: Request) -> Response:
        """Answer as /health does; some platforms ask for it by this name."""
        return await self.health(_request)

    async def version(self, _request: Request) -> Response:
        """Show the version of TokenMill."""
        return json_response({"version": VERSION})

    async def metrics(self, _request: Request) -> Response:
        """Show all metrics in Prometheus' text format."""
        return Response(self._context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    def _card(self, name: str) -> ModelCard:
        context = self._context
        parent = msgspec.UNSET if context.adapters.find(name) is None else context.model_name
        return ModelCard(name, context.started, context.ready.max_model_len, parent=parent, task=context.task)
