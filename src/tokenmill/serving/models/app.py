"""Build the application in front of all models: what is known of them is answered here, the rest by their servers.

what names a model, or comes with a body     -> that model, loaded for it
what only reads or steers a server           -> the model of `?model=`, or the one used last, if it is loaded
what belongs to one request, answer, session -> the loaded model that knows it
"""

from __future__ import annotations

from tokenmill.config.configs import ServerConfig
from tokenmill.core.version import VERSION
from tokenmill.serving.models.routes import ListRoutes, OllamaRoutes, PassRoutes, Shared
from tokenmill.serving.server.http.application import Application
from tokenmill.serving.server.http.middleware import METRICS_ROUTE, NO_ROUTES
from tokenmill.serving.server.http.page import page_routes
from tokenmill.serving.server.http.stack import guard
from tokenmill.serving.server.openai.batches import BatchesRoutes
from tokenmill.serving.server.openai.files import FilesRoutes

_GENERATIONS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/sessions",
    "/generate",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/api/embed",
    "/api/embeddings",
)
_OF_ONE_REQUEST = ("/v1/requests/{rest:path}", "/v1/responses/{rest:path}", "/v1/sessions/{rest:path}")
_OF_ONE_SERVER = (
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/flush_cache",
    "/abort_requests",
    "/v1/chat/completions/control",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/engines/{rest:path}",
)
_REFUSED = ("/update_weights_from_disk",)


def build_models_app(shared: Shared, config: ServerConfig, on_loopback: bool) -> Application:
    """Build the application; `on_loopback`: only this machine reaches its socket."""
    app = Application("TokenMill", VERSION, config.root_path)
    ollama, passing = OllamaRoutes(shared), PassRoutes(shared)
    listing = ListRoutes(shared, passing)
    _add_probes(app, listing)
    for path, handler in (
        ("/v1/models", listing.models),
        ("/models", listing.router_models),
        ("/v1/models/{model:path}", listing.model),
        ("/server_info", listing.server_info),
        ("/get_server_info", listing.server_info),
        (METRICS_ROUTE, listing.metrics),
        ("/api/version", ollama.version),
        ("/api/tags", ollama.tags),
        ("/api/ps", ollama.running),
    ):
        app.add_described("GET", path, handler)
    for path, handler in (
        ("/models/load", listing.load),
        ("/models/unload", listing.unload),
        ("/models/{model:path}/load", listing.load_named),
        ("/models/{model:path}/unload", listing.unload_named),
        ("/api/show", ollama.show),
        ("/api/pull", ollama.pull),
        ("/api/chat", ollama.generate),
        ("/api/generate", ollama.generate),
    ):
        app.add_described("POST", path, handler)
    for path in ("/", "/api/version", "/api/tags"):
        app.add("HEAD", path, ollama.is_there)
    for method, verb in (("POST", "copy"), ("POST", "create"), ("POST", "push"), ("DELETE", "delete")):
        app.add(method, f"/api/{verb}", ollama.refuse)
    _add_batches(app, shared)
    _add_passed(app, passing)
    page = page_routes()
    for path, answer in page.items():
        app.add("GET", path, answer)
    # What a model's server has and is not named above.
    app.add("GET", "/{rest:path}", passing.read)
    app.add("POST", "/{rest:path}", passing.generate)
    guard(app, config, on_loopback, frozenset(page) | ({METRICS_ROUTE} if config.metrics_open else NO_ROUTES))
    return app


def _add_probes(app: Application, listing: ListRoutes) -> None:
    """Add what watches this server, and needs no key."""
    for path, handler in (
        ("/health", listing.health),
        ("/livez", listing.live),
        ("/readyz", listing.ready),
        ("/ping", listing.health),
        ("/version", listing.version),
    ):
        app.add_described("GET", path, handler)
        app.add("HEAD", path, handler)
    app.add_described("POST", "/ping", listing.health)


def _add_batches(app: Application, shared: Shared) -> None:
    """Add files and batches, which are this server's own; their lines are answered by the models that they name."""
    files, batches = FilesRoutes(shared.batches), BatchesRoutes(shared.batches, shared.bodies)
    for method, path, handler in (
        ("POST", "/v1/files", files.create),
        ("GET", "/v1/files", files.list),
        ("GET", "/v1/files/{file_id}", files.get),
        ("GET", "/v1/files/{file_id}/content", files.content),
        ("DELETE", "/v1/files/{file_id}", files.delete),
        ("POST", "/v1/batches", batches.create),
        ("GET", "/v1/batches", batches.list),
        ("GET", "/v1/batches/{batch_id}", batches.get),
        ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
    ):
        app.add_described(method, path, handler)


def _add_passed(app: Application, passing: PassRoutes) -> None:
    """Add what the servers of models answer."""
    for path in _REFUSED:
        for method in ("GET", "POST", "DELETE"):
            app.add(method, path, passing.refuse)
    for path in _GENERATIONS:
        app.add_described("POST", path, passing.generate)
    for path in _OF_ONE_SERVER:
        app.add("POST", path, passing.steer)
    for method in ("GET", "DELETE"):
        app.add(method, "/v1/responses/{response_id}", passing.stored_response)
    for path in _OF_ONE_REQUEST:
        for method in ("GET", "POST", "DELETE"):
            app.add(method, path, passing.find)
