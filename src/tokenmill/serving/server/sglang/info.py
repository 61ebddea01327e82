"""Serve SGLang's routes besides /generate: the model's name, and emptying the prefix cache."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.json_response import json_response


class SglangRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def model_info(self, _request: Request) -> Response:
        """Show the model by its name in the API; its path stays private."""
        ready = self._context.ready
        names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), self._context.model_name)
        senses = dict.fromkeys(("has_image_understanding", "has_audio_understanding"), False)
        facts = {"is_generation": True, "architectures": [ready.architecture], "max_model_len": ready.max_model_len}
        return json_response(names | facts | senses)

    async def flush_cache(self, _request: Request) -> Response:
        """Forget all cached prefixes, unless requests are running."""
        if not await self._context.engines.reset_prefix_cache(False):
            raise InvalidRequest("requests are running: the cache is not flushed")
        return PlainTextResponse("Cache flushed.\n")
