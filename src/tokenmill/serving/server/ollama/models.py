"""Serve what Ollama's clients ask about models: /api/tags, ps, show, version, pull; and refuse what changes models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.version import VERSION
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.reply import JSON_LINES
from tokenmill.serving.server.http.body import read_body
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.ollama.names import find_model, known_names, tagged

# Ollama's word for a model that is never unloaded is a day far away.
NEVER_EXPIRES = "2318-01-01T00:00:00Z"


class ModelBody(msgspec.Struct, kw_only=True):
    """A body that names a model; other fields say nothing here."""

    model: str | None = None
    name: str | None = None  # the older word
    stream: bool | None = None


class ModelRoutes:
    """The handlers of these routes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def version(self, _request: Request) -> Response:
        """Show the version."""
        return json_response({"version": VERSION})

    async def running(self, _request: Request) -> Response:
        """Answer clients that only ask whether somebody is there."""
        return Response(status_code=200)

    async def tags(self, _request: Request) -> Response:
        """List the model and its adapters."""
        return json_response({"models": [self._entry(name) for name in known_names(self._context)]})

    async def ps(self, _request: Request) -> Response:
        """List what is loaded: all of them."""
        ready = self._context.ready
        size = 0 if ready.device == "cpu" else ready.weight_bytes
        loaded = {"expires_at": NEVER_EXPIRES, "size_vram": size, "context_length": ready.max_model_len}
        return json_response({"models": [self._entry(name) | loaded for name in known_names(self._context)]})

    async def show(self, request: Request) -> Response:
        """Describe a model: its template, its sizes, and what it can do."""
        await self._named(request)
        ready, family = self._context.ready, self._family
        info = {
            "general.architecture": family,
            "general.parameter_count": ready.num_parameters,
            f"{family}.context_length": ready.max_model_len,
            f"{family}.vocab_size": ready.vocab_size,
        }
        return json_response(
            {
                "license": "",
                "modelfile": f"FROM {self._context.model_name}\n",
                "parameters": "\n".join(f"{name} {value}" for name, value in self._context.default_sampling.items()),
                "template": str(self._context.tokenizer_info().get("chat_template") or ""),
                "details": self._details(),
                "model_info": info,
                "capabilities": self._capabilities(),
                "modified_at": self._modified(),
            }
        )

    async def pull(self, request: Request) -> Response:
        """Report success for a model that is here; no other is fetched."""
        body, name = await self._named(request)
        if body.stream is False:
            return json_response({"status": "success"})
        digest = f"sha256:{self._digest(name)}"
        size = self._context.ready.weight_bytes
        pulling = {"status": f"pulling {digest[7:19]}", "digest": digest, "total": size, "completed": size}
        lines = ({"status": "pulling manifest"}, pulling, {"status": "verifying sha256 digest"}, {"status": "success"})
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        return Response(content, headers={name.decode(): value.decode() for name, value in JSON_LINES.headers})

    async def refuse(self, request: Request) -> Response:
        """Refuse what makes, copies or deletes models."""
        verb = request.scope["path"].rstrip("/").rpartition("/")[2][:40]
        raise InvalidRequest(f"{verb}: the models of this server are those that it was started with")

    async def _named(self, request: Request) -> tuple[ModelBody, str]:
        body = await read_body(request, ModelBody, self._context.bodies)
        return body, find_model(self._context, body.model or body.name)

    @property
    def _family(self) -> str:
        ready = self._context.ready
        return ready.stored.family or ready.architecture.lower()

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": self._modified(),
            "size": self._context.ready.weight_bytes,
            "digest": self._digest(name),
            "details": self._details(),
            "capabilities": self._capabilities(),
        }

    def _details(self) -> dict[str, Any]:
        ready = self._context.ready
        return {
            "parent_model": "",
            "format": ready.stored.format,
            "family": self._family,
            "families": [self._family],
            "parameter_size": parameter_count(ready.num_parameters),
            "quantization_level": ready.stored.quantization or ready.dtype,
        }

    def _capabilities(self) -> list[str]:
        parsers = self._context.parsers
        offered = {
            "tools": parsers.finds_calls and bool(parsers.notation),
            "thinking": bool(parsers.reasoning),
            "vision": self._context.ready.takes_images,
        }
        return ["completion", *(name for name, is_there in offered.items() if is_there)]

    def _digest(self, name: str) -> str:
        return hashlib.sha256(f"{name}|{self._context.ready.fingerprint}".encode()).hexdigest()

    def _modified(self) -> str:
        return datetime.fromtimestamp(self._context.started, UTC).isoformat().replace("+00:00", "Z")


def parameter_count(number: int) -> str:
    """Return a number of parameters as Ollama writes it: 751.63M, 7.6B."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
