"""Build the application: its routes, their description in /openapi.json, and the middleware around them.

Bodies are read and checked by msgspec inside the routes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenmill.config.configs import ServerConfig
from tokenmill.core.version import VERSION
from tokenmill.serving.server.anthropic.body import MessagesBody, PromptBody
from tokenmill.serving.server.anthropic.messages import MessagesRoutes
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.tokens import DetokenizeBody, TokenizeBody, TokenRoutes
from tokenmill.serving.server.http.application import Application, Handler
from tokenmill.serving.server.http.browser_guard import JSON, MULTIPART
from tokenmill.serving.server.http.middleware import METRICS_ROUTE, NO_ROUTES
from tokenmill.serving.server.http.openapi import body_of, complete, query_of
from tokenmill.serving.server.http.page import page_routes
from tokenmill.serving.server.http.stack import guard
from tokenmill.serving.server.llama_cpp.completion import CompletionBody, CompletionRoutes, InfillBody
from tokenmill.serving.server.llama_cpp.descriptions import DescriptionRoutes, TemplateBody
from tokenmill.serving.server.llama_cpp.embedding import EmbeddingRoute as LlamaEmbeddingRoute
from tokenmill.serving.server.llama_cpp.embedding import LlamaEmbeddingBody
from tokenmill.serving.server.llama_cpp.slots import ActionQuery, SlotBody, SlotRoutes, SlotsQuery
from tokenmill.serving.server.ollama.body import OllamaChatBody, OllamaGenerateBody
from tokenmill.serving.server.ollama.embed import EmbedBody, EmbedRoutes
from tokenmill.serving.server.ollama.generation import GenerationRoutes
from tokenmill.serving.server.ollama.models import ModelBody, ModelRoutes
from tokenmill.serving.server.openai.audio import AudioRoutes
from tokenmill.serving.server.openai.audio_forms import TranscriptionForm, TranslationForm
from tokenmill.serving.server.openai.batches import BatchBody, BatchesQuery, BatchesRoutes
from tokenmill.serving.server.openai.chat import ChatBody, ChatRoute
from tokenmill.serving.server.openai.completions import TextBody, TextRoute
from tokenmill.serving.server.openai.embeddings import EmbeddingBody, EmbeddingRoute
from tokenmill.serving.server.openai.fields import UNSUPPORTED
from tokenmill.serving.server.openai.files import FilesQuery, FilesRoutes
from tokenmill.serving.server.openai.responses import ResponsesRoutes
from tokenmill.serving.server.openai.responses_body import ResponsesBody
from tokenmill.serving.server.openai.sessions import SessionBody, SessionsRoutes
from tokenmill.serving.server.openai.stored_responses import StoredResponsesRoutes
from tokenmill.serving.server.openai.upload import UploadForm
from tokenmill.serving.server.operators.adapters import AdapterRoutes, LoadAdapterBody, UnloadAdapterBody
from tokenmill.serving.server.operators.admin import AbortBody, AdminRoutes, ControlBody, PauseQuery, ResetQuery
from tokenmill.serving.server.operators.engines import EngineRoutes, RemoveQuery, WeightsBody
from tokenmill.serving.server.operators.info import InfoRoutes
from tokenmill.serving.server.operators.live import LiveRoutes
from tokenmill.serving.server.retrieval.routes import BODIES, retrieval_routes
from tokenmill.serving.server.sglang.generate import NativeBody, NativeRoute, SglangRoutes

_BODIES = (
    ChatBody,
    TextBody,
    EmbeddingBody,
    *BODIES,
    MessagesBody,
    PromptBody,
    ResponsesBody,
    NativeBody,
    CompletionBody,
    InfillBody,
    TemplateBody,
    SlotBody,
    LlamaEmbeddingBody,
    OllamaChatBody,
    OllamaGenerateBody,
    EmbedBody,
    ModelBody,
    TokenizeBody,
    DetokenizeBody,
    AbortBody,
    ControlBody,
    WeightsBody,
    LoadAdapterBody,
    UnloadAdapterBody,
    BatchBody,
    SessionBody,
    UploadForm,
    TranscriptionForm,
    TranslationForm,
)
_FORMS = (UploadForm, TranscriptionForm, TranslationForm)


def build_app(context: ServerContext, config: ServerConfig, on_loopback: bool = False) -> Application:
    """Build the application around a running engine; `on_loopback`: only this machine reaches its socket."""
    app = Application("TokenMill", VERSION, config.root_path)
    _add_routes(app, context)
    page = page_routes()
    for path, answer in page.items():
        app.add("GET", path, answer)
    complete(app.document, _BODIES, UNSUPPORTED)
    guard(app, config, on_loopback, frozenset(page) | ({METRICS_ROUTE} if config.metrics_open else NO_ROUTES))
    return app


def _add_routes(app: Application, context: ServerContext) -> None:
    """Add all routes; the first that fits a path answers it."""
    routes = _Routes(context)
    for path, post, *bodies in routes.with_bodies():
        described = body_of(bodies, MULTIPART if bodies[0] in _FORMS else JSON)
        app.add_described("POST", path, post, described)
    for path, act, query in routes.actions():
        app.add_described("POST", path, act, None if query is None else query_of(query))
    for path, get in routes.readings():
        app.add_described("GET", path, get)
    files, info = routes.files, routes.info
    for path, get, which in routes.queries():
        app.add_described("GET", path, get, query_of(which))
    app.add_described("POST", "/slots/{id_slot}", routes.slots.act, body_of([SlotBody], JSON) | query_of(ActionQuery))
    app.add_described("POST", "/ping", info.ping)  # as one platform does
    # Ollama's clients ask whether it runs, and may ask for what only a keeper of models can do.
    named = routes.named
    app.add("HEAD", "/", named.running)
    for method, verb in (("POST", "copy"), ("POST", "create"), ("POST", "push"), ("DELETE", "delete")):
        app.add_described(method, f"/api/{verb}", named.refuse)
    app.add_described("DELETE", "/v1/responses/{response_id}", routes.stored.delete)
    app.add_described("DELETE", "/v1/files/{file_id}", files.delete)
    app.add_described("DELETE", "/v1/sessions/{session_id}", routes.sessions.delete)


class _Routes:
    """The handlers of all routes, and which path each answers, in the order of the API's description."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._tokens, self._admin, self._sglang = TokenRoutes(context), AdminRoutes(context), SglangRoutes(context)
        self._engines = EngineRoutes(context)
        self.info, self.responses = InfoRoutes(context), ResponsesRoutes(context)
        self.stored = StoredResponsesRoutes(context.responses)
        self.files, self.batches = FilesRoutes(context.batches), BatchesRoutes(context.batches, context.bodies)
        self.sessions, self.named = SessionsRoutes(context), ModelRoutes(context)
        self._shown, self.slots = DescriptionRoutes(context), SlotRoutes(context)

    def with_bodies(self) -> Iterable[tuple[str, Handler, *tuple[type[msgspec.Struct], ...]]]:
        """Return what is posted with a body: path, handler, forms of the body."""
        context, tokens, messages = self._context, self._tokens, MessagesRoutes(self._context)
        adapters, audio = AdapterRoutes(context), AudioRoutes(context)
        ollama, vectors, llama = GenerationRoutes(context), EmbedRoutes(context), CompletionRoutes(context)
        return (
            ("/v1/chat/completions", ChatRoute(context).post, ChatBody),
            ("/v1/completions", TextRoute(context).post, TextBody),
            ("/v1/embeddings", EmbeddingRoute(context).post, EmbeddingBody),
            *((path, handler, body) for path, (handler, body) in retrieval_routes(context).items()),
            ("/v1/audio/transcriptions", audio.transcribe, TranscriptionForm),
            ("/v1/audio/translations", audio.translate, TranslationForm),
            ("/v1/responses", self.responses.create, ResponsesBody),
            ("/v1/responses/input_tokens", self.responses.input_tokens, ResponsesBody),
            ("/v1/messages", messages.post, MessagesBody),
            ("/v1/messages/count_tokens", messages.count_tokens, PromptBody),
            ("/generate", NativeRoute(context).post, NativeBody),
            ("/infill", llama.infill, InfillBody),
            ("/completion", llama.completion, CompletionBody),
            ("/completions", llama.completion, CompletionBody),
            ("/apply-template", self._shown.apply_template, TemplateBody),
            ("/embedding", LlamaEmbeddingRoute(context).embedding, LlamaEmbeddingBody),
            ("/api/chat", ollama.chat, OllamaChatBody),
            ("/api/generate", ollama.generate, OllamaGenerateBody),
            ("/api/embed", vectors.embed, EmbedBody),
            ("/api/embeddings", vectors.embeddings, EmbedBody),
            ("/api/show", self.named.show, ModelBody),
            ("/api/pull", self.named.pull, ModelBody),
            ("/tokenize", tokens.tokenize, TokenizeBody),
            ("/detokenize", tokens.detokenize, DetokenizeBody),
            ("/abort_requests", self._admin.abort_requests, AbortBody),
            ("/v1/chat/completions/control", self._admin.control, ControlBody),
            ("/update_weights_from_disk", self._engines.update_weights, WeightsBody),
            ("/v1/load_lora_adapter", adapters.load, LoadAdapterBody),
            ("/v1/unload_lora_adapter", adapters.unload, UnloadAdapterBody),
            ("/v1/batches", self.batches.create, BatchBody),
            ("/v1/files", self.files.create, UploadForm),
            ("/v1/sessions", self.sessions.open, SessionBody),
            ("/v1/sessions/{session_id}/input", self.sessions.input, ChatBody, TextBody),
        )

    def actions(self) -> Iterable[tuple[str, Handler, type[msgspec.Struct] | None]]:
        """Return what is posted without a body: path, handler, form of the query."""
        admin, engines = self._admin, self._engines
        return (
            ("/pause", admin.pause, PauseQuery),
            ("/resume", admin.resume, None),
            ("/v1/requests/{id}/answer_now", admin.answer_now, None),
            ("/reset_prefix_cache", admin.reset_prefix_cache, ResetQuery),
            ("/sleep", admin.sleep, None),
            ("/engines/add", engines.add, None),
            ("/engines/{index}/drain", engines.drain, None),
            ("/engines/{index}/remove", engines.remove, RemoveQuery),
            ("/flush_cache", self._sglang.flush_cache, None),
            ("/v1/responses/{response_id}/cancel", self.responses.cancel, None),
            ("/v1/batches/{batch_id}/cancel", self.batches.cancel, None),
            ("/v1/sessions/{session_id}/abort", self.sessions.abort, None),
        )

    def queries(self) -> Iterable[tuple[str, Handler, type[msgspec.Struct]]]:
        """Return what is read with a query: path, handler, form of the query."""
        return (
            ("/v1/files", self.files.list, FilesQuery),
            ("/v1/batches", self.batches.list, BatchesQuery),
            ("/slots", self.slots.show, SlotsQuery),
        )

    def readings(self) -> Iterable[tuple[str, Handler]]:
        """Return what is read without a query: path and handler."""
        info, admin, sglang = self.info, self._admin, self._sglang
        live = LiveRoutes(self._context)
        return (
            ("/v1/models", info.models),
            ("/v1/models/{model:path}", info.model),
            ("/models", self._shown.models),
            ("/props", self._shown.props),
            ("/api/v0/models", self._shown.studio_models),
            ("/api/v0/models/{model:path}", self._shown.studio_model),
            ("/v1/requests", live.requests),
            ("/v1/requests/{id}", admin.request),
            ("/v1/responses/{response_id}", self.stored.get),
            ("/v1/files/{file_id}", self.files.get),
            ("/v1/files/{file_id}/content", self.files.content),
            ("/v1/batches/{batch_id}", self.batches.get),
            ("/v1/sessions", self.sessions.list),
            ("/v1/sessions/{session_id}", self.sessions.get),
            ("/health", info.health),
            ("/livez", info.livez),
            ("/readyz", info.readyz),
            ("/health_generate", admin.health_generate),
            ("/ping", info.ping),
            ("/version", info.version),
            ("/engines", self._engines.list),
            ("/engines/{index}/prefixes/{number}", self._engines.prefix),
            ("/live", live.live),
            ("/load", admin.load),
            ("/server_info", admin.server_info),
            ("/get_server_info", admin.server_info),
            ("/model_info", sglang.model_info),
            ("/get_model_info", sglang.model_info),
            ("/tokenizer_info", self._tokens.info),
            ("/metrics", info.metrics),
            ("/api/version", self.named.version),
            ("/api/tags", self.named.tags),
            ("/api/ps", self.named.ps),
        )
