"""Serve the routes that load and unload adapters while the server runs, with vLLM's names."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import Conflict
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.fields import Label
from tokenmill.serving.server.http.body import read_body
from tokenmill.serving.server.http.json_response import json_response


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An adapter's name and its folder below `--lora-dir`; `load_inplace`: replace another one of this name."""

    lora_name: Label
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The name of an adapter to unload; `lora_int_id` is ignored."""

    lora_name: Label
    lora_int_id: int | None = None


class AdapterRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def load(self, request: Request) -> Response:
        """Load an adapter; the reply comes when all engines have read it."""
        context = self._context
        body = await read_body(request, LoadAdapterBody, context.bodies)
        if body.lora_name in context.names:
            raise Conflict(f"{body.lora_name} is the name of the base model")
        adapter = await context.adapters.load(body.lora_name, body.lora_path, context.engines, bool(body.load_inplace))
        shown = {"lora_name": adapter.name, "digest": adapter.digest, "rank": adapter.rank}
        return json_response({"status": "loaded"} | shown)

    async def unload(self, request: Request) -> Response:
        """Unload an adapter: new requests cannot name it any more."""
        body = await read_body(request, UnloadAdapterBody, self._context.bodies)
        self._context.adapters.unload(body.lora_name)
        return json_response({"status": "unloaded", "lora_name": body.lora_name})
