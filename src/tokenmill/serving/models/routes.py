"""The handlers of a server of several models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, NotFound
from tokenmill.core.version import VERSION
from tokenmill.serving.batches.service import BatchService
from tokenmill.serving.models.asked import Asked, choose, read_asked
from tokenmill.serving.models.catalogue import Catalogue, Entry
from tokenmill.serving.models.errors import ModelNotLoaded
from tokenmill.serving.models.listing import Listing
from tokenmill.serving.models.reply import Answers
from tokenmill.serving.models.scrape import scraped
from tokenmill.serving.models.service import ModelService
from tokenmill.serving.models.states import SERVING
from tokenmill.serving.server.generation.reply import JSON_LINES
from tokenmill.serving.server.http.body import read_body
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.errors import ModelNotFound
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.ollama.models import ModelBody
from tokenmill.serving.server.ollama.writer import now
from tokenmill.serving.server.openai.stored_responses import StoredResponsesRoutes


class Shared(msgspec.Struct, frozen=True):
    """Parts that all handlers use.

    Attributes:
        key_models: names of the models that an owner may use, where not all.
        responses: answer for models that have left.
        batches: keeps files and batches; None: this server has none. lines: counts its lines for /metrics.
    """

    service: ModelService
    answers: Answers
    listing: Listing
    bodies: BodyBudget
    key_models: Mapping[str, frozenset[str]]
    responses: StoredResponsesRoutes
    batches: BatchService | None = None
    lines: Collector | None = None

    def seen_by(self, request: Request) -> Catalogue:
        """Return the models that the key of a request may use."""
        return self.service.catalogue.only(self.key_models.get(owner_of(request.scope)))

    def entry(self, request: Request, name: str | None) -> Entry:
        """Return the model of a name, or of none; raise as `choose` does."""
        return choose(self.seen_by(request), name, self.service.last_used)


def not_loaded(name: str | None) -> ModelNotLoaded:
    """Return the error of a request that loads nothing and needs a loaded model."""
    if name is None:
        return ModelNotLoaded("no model is loaded: name one with ?model=, and load it with POST /models/load")
    return ModelNotLoaded(f"model {name} is not loaded: POST /models/load loads it")


class NamedBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of llama.cpp's /models/load and /models/unload."""

    model: str


class ListRoutes:
    """The routes that list models, load and unload them."""

    def __init__(self, shared: Shared, passing: PassRoutes) -> None:
        self._shared = shared
        self._passing = passing
        self._service, self._listing = shared.service, shared.listing

    async def health(self, request: Request) -> Response:
        """Return 200 while this server takes requests; with ?model=, while that model is loaded and well."""
        name = request.query_params.get("model")
        if name is None:
            return Response(status_code=200)
        entry = self._shared.seen_by(request).find(name)
        if self._service.record(entry.name).state not in SERVING:
            return json_response(self._listing.state(entry), 503)
        reply = await self._service.servers[entry.name].http.get("/health")
        return Response(reply.content, reply.status_code, media_type="application/json")

    async def live(self, _request: Request) -> Response:
        """Return 200 while this server answers at all."""
        return Response(status_code=200)

    async def ready(self, _request: Request) -> Response:
        """Return 200 once the pinned models have been loaded, or have died, which is theirs alone; 503 before."""
        service = self._service
        pinned = [entry.name for entry in service.catalogue if entry.preset.pinned]
        awaited = [name for name in pinned if not (service.record(name).used or service.deaths[name])]
        if awaited:
            raise ModelNotLoaded(f"pinned models are being loaded: {', '.join(awaited)}")
        return Response(status_code=200)

    async def version(self, _request: Request) -> Response:
        """Show the version."""
        return json_response({"version": VERSION})

    async def models(self, request: Request) -> Response:
        """List all models with their states."""
        return json_response({"object": "list", "data": self._listing.cards(self._shared.seen_by(request))})

    async def model(self, request: Request) -> Response:
        """Show one model."""
        name = request.path_params["model"]
        return json_response(self._listing.card(self._shared.seen_by(request).find(name)) | {"id": name})

    async def server_info(self, request: Request) -> Response:
        """Show what a loaded model's server is; without ?model= also what one that is not loaded would be."""
        name = request.query_params.get("model")
        seen = self._shared.seen_by(request)
        entry = next(iter(seen), None) if name is None else seen.find(name)
        if entry is not None and self._service.record(entry.name).state in SERVING:
            return await self._passing.pass_on(request, entry, None)
        if entry is None or name is not None:
            raise not_loaded(name)
        takes_images = "vision" in entry.description.capabilities
        engine = {"model": entry.name, "max_model_len": entry.description.context, "takes_images": takes_images}
        info = {"version": VERSION, "engine": engine, "engines": [], "settings": {}}
        return json_response(info | {"default_sampling": dict(entry.preset.sampling)})

    async def router_models(self, request: Request) -> Response:
        """List all models as llama.cpp's router does; with ?reload=1 look for new ones first."""
        if request.query_params.get("reload") == "1":
            await self._service.reload()
        cards = [self._listing.router_card(entry) for entry in self._shared.seen_by(request)]
        return json_response({"object": "list", "data": cards})

    async def metrics(self, request: Request) -> Response:
        """Show the metrics of all loaded models, each with its name, and of the models as such."""
        return await scraped(self._service, self._shared.seen_by(request), self._shared.lines)

    async def load(self, request: Request) -> Response:
        """Begin to load a model; the reply does not wait for it."""
        return self._load(request, (await read_body(request, NamedBody, self._shared.bodies)).model)

    async def load_named(self, request: Request) -> Response:
        """Begin to load the model of the path."""
        return self._load(request, request.path_params["model"])

    async def unload(self, request: Request) -> Response:
        """Let a model leave when what it has begun has ended."""
        return self._unload(request, (await read_body(request, NamedBody, self._shared.bodies)).model)

    async def unload_named(self, request: Request) -> Response:
        """Let the model of the path leave."""
        return self._unload(request, request.path_params["model"])

    def _load(self, request: Request, name: str) -> Response:
        self._service.load(self._shared.seen_by(request).find(name))
        return json_response({"success": True})

    def _unload(self, request: Request, name: str) -> Response:
        self._service.unload(self._shared.seen_by(request).find(name))
        return json_response({"success": True})


class OllamaRoutes:
    """The routes of Ollama's API that concern all models, or none."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._service, self._listing = shared.service, shared.listing

    async def version(self, _request: Request) -> Response:
        """Show the version."""
        return json_response({"version": VERSION})

    async def is_there(self, _request: Request) -> Response:
        """Answer clients that only ask whether somebody is there."""
        return Response(status_code=200)

    async def tags(self, request: Request) -> Response:
        """List all models."""
        return json_response({"models": self._listing.tags(self._shared.seen_by(request))})

    async def running(self, request: Request) -> Response:
        """List the models that are loaded."""
        return json_response({"models": self._listing.running(self._shared.seen_by(request))})

    async def show(self, request: Request) -> Response:
        """Describe a model: as its server does if it is loaded."""
        body = await read_body(request, ModelBody, self._shared.bodies)
        entry = self._named(request, body.model or body.name)
        if self._service.record(entry.name).state in SERVING:
            asked = Asked(None, msgspec.json.encode({"model": body.model or body.name}))
            return await self._shared.answers.answer(request, entry, asked)
        return json_response(self._listing.shown(entry))

    async def pull(self, request: Request) -> Response:
        """Report success for a model that is here; no other is fetched."""
        body = await read_body(request, ModelBody, self._shared.bodies)
        entry = self._named(request, body.model or body.name)
        if body.stream is False:
            return json_response({"status": "success"})
        digest = f"sha256:{entry.digest}"
        size = entry.found.num_bytes
        pulling = {"status": f"pulling {digest[7:19]}", "digest": digest, "total": size, "completed": size}
        lines = ({"status": "pulling manifest"}, pulling, {"status": "verifying sha256 digest"}, {"status": "success"})
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        return Response(content, headers={name.decode(): value.decode() for name, value in JSON_LINES.headers})

    async def refuse(self, request: Request) -> Response:
        """Refuse what makes, copies or deletes models."""
        verb = request.scope["path"].rstrip("/").rpartition("/")[2][:40]
        raise InvalidRequest(f"{verb}: the models of this server are those of its folder and its presets")

    async def generate(self, request: Request) -> Response:
        """Let a model answer; a body without a prompt loads it, or with `keep_alive: 0` unloads it."""
        asked = await read_asked(request, self._shared.bodies)
        entry = self._named(request, asked.name)
        if not asked.is_empty:
            return await self._shared.answers.answer(request, entry, asked)
        if asked.keep_alive == 0:
            self._service.unload(entry)
            reason = "unload"
        else:
            await self._shared.answers.load(request, entry, asked.keep_alive)
            reason = "load"
        is_chat = request.url.path.endswith("/chat")
        part: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        said = {"model": asked.name, "created_at": now(), **part, "done": True, "done_reason": reason}
        return json_response(said)

    def _named(self, request: Request, name: str | None) -> Entry:
        if not name:
            raise InvalidRequest("model is required", "model")
        return self._shared.seen_by(request).find(name)


class PassRoutes:
    """The routes that the servers of models answer."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._service = shared.service

    async def generate(self, request: Request) -> Response:
        """Let the model that the request names answer; it is loaded for it."""
        asked = await read_asked(request, self._shared.bodies)
        return await self._shared.answers.answer(request, self._shared.entry(request, asked.name), asked)

    async def read(self, request: Request) -> Response:
        """Let the server of a loaded model tell of itself."""
        return await self.pass_on(request, self._loaded(request), None)

    async def steer(self, request: Request) -> Response:
        """Let an operator steer the server of a loaded model."""
        asked = await read_asked(request, self._shared.bodies)
        return await self.pass_on(request, self._loaded(request), asked.body)

    async def find(self, request: Request) -> Response:
        """Ask the loaded models one after the other which of them knows a request, an answer or a session."""
        body = (await read_asked(request, self._shared.bodies)).body if request.method == "POST" else None
        reply: Response | None = None
        for name in self._serving(request):
            reply = await self.pass_on(request, self._service.catalogue[name], body)
            if reply.status_code != httpx.codes.NOT_FOUND:
                return reply
        if reply is None:
            raise NotFound("no loaded model knows of it", "id")
        return reply

    async def stored_response(self, request: Request) -> Response:
        """Show or delete a stored response: the server that makes it has it, or the folder of all."""
        try:
            reply = await self.find(request)
        except NotFound:
            reply = None
        if reply is not None and reply.status_code != httpx.codes.NOT_FOUND:
            return reply
        stored = self._shared.responses
        return await (stored.delete(request) if request.method == "DELETE" else stored.get(request))

    async def refuse(self, request: Request) -> Response:
        """Refuse what only a server of one model has."""
        path = request.scope["path"][:60]
        raise InvalidRequest(f"{path} is not there on a server of several models: serve one model, with its own flags")

    def _serving(self, request: Request) -> list[str]:
        """Return the names of the models that serve and that the key of a request may use."""
        seen = self._shared.seen_by(request)
        return [name for name in self._service.servers if name in seen and self._service.record(name).state in SERVING]

    def _loaded(self, request: Request) -> Entry:
        """Return the model of `?model=`, or the one used last, if it is loaded.

        Raises:
            ModelNotLoaded, ModelNotFound: it is not.
        """
        name, seen, last = request.query_params.get("model"), self._shared.seen_by(request), self._service.last_used
        if name is None and (last is None or last not in seen):
            serving = self._serving(request)
            if not serving:
                raise not_loaded(None)
            name = serving[0]
        entry = seen.find(name or last or "")
        if self._service.record(entry.name).state not in SERVING:
            raise not_loaded(entry.name)
        return entry

    async def pass_on(self, request: Request, entry: Entry, body: bytes | None) -> Response:
        """Return what the server of a loaded model answers.

        Raises:
            ModelNotFound: it has gone meanwhile.
        """
        async with AsyncExitStack() as stack:
            try:
                return await self._shared.answers.ask(request, self._service.servers[entry.name].http, body, stack)
            except (httpx.HTTPError, KeyError):
                raise ModelNotFound(f"the server of model {entry.name} is gone") from None
