"""Hold what the routes share: the engine's client, the model's name and limits, and the server's health."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenmill.config.vision import MediaLimits
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest, PromptTooLong, WrongTask
from tokenmill.core.pooling import PoolingInfo
from tokenmill.core.version import VERSION
from tokenmill.serving.batches.service import BatchService
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.frontend.open_calls import OpenCalls
from tokenmill.serving.observe.event_log import EventLog
from tokenmill.serving.observe.metrics import Metrics
from tokenmill.serving.replicas.engines import Engines
from tokenmill.serving.replicas.fleet import Fleet
from tokenmill.serving.server.adapters import AdapterRegistry
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.errors import ModelNotFound
from tokenmill.serving.server.live_hub import LiveHub
from tokenmill.serving.server.media import MediaFetcher
from tokenmill.serving.server.response_store import ResponseStore
from tokenmill.serving.server.script import Script
from tokenmill.serving.server.session_store import SessionStore


class ToolParsers(msgspec.Struct, frozen=True):
    """The parsers of chat answers, named as in `--tool-call-parser` and `--reasoning-parser`.

    Attributes:
        notation: of calls; "": there is none.
        finds_calls: the model decides whether to call tools.
        reasoning: of thinking; "": there is none.
        has_grammar: a grammar keeps calls to the schemas of their tools, also where the model decides.
        budget: tokens of thinking at most, where a chat does not say; None: any number.
        end_of_thinking: what the model is told where that is used up.
        template_defaults: variables of the chat template where a chat gives none.
    """

    notation: str = ""
    finds_calls: bool = False
    reasoning: str = ""
    has_grammar: bool = True
    budget: int | None = None
    end_of_thinking: str = ""
    template_defaults: dict[str, Any] = {}

    def template_kwargs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the variables of a chat's template; the effort that it asks for switches thinking before a default."""
        hidden = "enable_thinking" if "reasoning_effort" in given else None
        return {name: value for name, value in self.template_defaults.items() if name != hidden} | given


class ServerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the routes of an API process share.

    Attributes:
        calls: the open calls of all API processes.
        engines: the way to ask the engines themselves.
        ready: the engine's report when it became ready; of several, that of the engine with the shortest context.
        model_name: the model's id in the API and in replies.
        model_names: see `names`; empty: `model_name` alone.
        default_sampling: sampling parameters where a request gives none.
        parsers: the parsers for the text of chat answers.
        takes_priority: requests may bring a priority; else it would be ignored.
        settings: the flags, as far as operators may see them over HTTP: no keys, no paths.
        started: Unix time of the start.
        trouble: why the server is unhealthy now; None when it is healthy.
        tokenizer_info: returns the reply of /tokenizer_info; it reads files.
        log: gets a line about each request; None: no log.
        bodies: the memory budget of bodies that are still arriving.
        batches: keeps files and batches; None: this server has no batches.
        live: shows what the engines do; None: this server does not show it.
        adapters: the adapters that requests may name besides the model.
        media: fetches the images that requests name.
        responses: the stored responses of /v1/responses.
        sessions: the open sessions of /v1/sessions.
        sse_ping: seconds of silence after which a stream gets a sign of life; 0: never.
        settles_prompts: known volatile blocks of chats are dropped or moved.
        script: answers that chats are held to.
    """

    client: EngineClient
    calls: OpenCalls
    engines: Engines
    ready: EngineReady
    metrics: Metrics
    model_name: str
    default_sampling: dict[str, Any]
    max_logprobs: int
    takes_priority: bool
    parsers: ToolParsers
    settings: dict[str, Any]
    started: int
    trouble: Callable[[], str | None]
    log: EventLog | None = None
    model_names: tuple[str, ...] = ()
    tokenizer_info: Callable[[], dict[str, Any]] = dict
    bodies: BodyBudget = msgspec.field(default_factory=BodyBudget)
    batches: BatchService | None = None
    fleet: Fleet | None = None
    live: LiveHub | None = None
    adapters: AdapterRegistry = msgspec.field(default_factory=AdapterRegistry)
    media: MediaFetcher = msgspec.field(default_factory=lambda: MediaFetcher((), MediaLimits()))
    responses: ResponseStore = msgspec.field(default_factory=ResponseStore)
    sessions: SessionStore = msgspec.field(default_factory=SessionStore)
    sse_ping: float = 0.0
    settles_prompts: bool = True
    script: Script = msgspec.field(default_factory=Script)

    @property
    def names(self) -> tuple[str, ...]:
        """All ids by which requests may name the model."""
        return self.model_names or (self.model_name,)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes with the software and with the way the model is served."""
        ready = self.engines.ready or self.ready
        parts = (
            VERSION,
            self.model_name,
            ready.fingerprint,
            ready.dtype,
            ready.device,
            ready.kernels,
            ready.attention_backend,
        )
        return "fp_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:10]

    @property
    def pooling(self) -> PoolingInfo | None:
        """The pooling of a model that makes vectors or scores; None: it generates."""
        return self.ready.pooling

    @property
    def task(self) -> str:
        """The task of the model: generate, transcribe, embed, rerank or classify."""
        if self.pooling is None:
            return "generate" if self.ready.transcription is None else "transcribe"
        return "rerank" if self.pooling.is_reranker else self.pooling.task.value

    def check_generates(self, *, is_transcript: bool = False) -> None:
        """Refuse a request for text where the model makes vectors or scores, or writes down sound alone.

        Raises:
            InvalidRequest: saying what the model is for.
        """
        if self.pooling is not None:
            raise WrongTask(f"{self.pooling.purpose}; it generates no text", "model")
        if self.ready.transcription is not None and not is_transcript:
            sentence = "this model writes down sound: ask /v1/audio/transcriptions or /v1/audio/translations"
            raise WrongTask(f"{sentence}; it answers no text", "model")

    def check_priority(self, priority: int | None) -> int:
        """Return the priority to run a request with.

        Raises:
            InvalidRequest: the request has a priority, but the engine serves in order of arrival.
        """
        if priority and not self.takes_priority:
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", "priority")
        return priority or 0

    def check_count(self, messages: str | Sequence[dict[str, Any]] | None, param: str = "messages") -> None:
        """Refuse a chat that has more messages, parts and calls than the context has tokens, before any other work.

        Raises:
            PromptTooLong: saying how many.
        """
        if messages is None or isinstance(messages, str):
            return
        most = self.ready.max_model_len
        count = len(messages) + sum(map(_num_inside, messages))
        if count > most:
            sentence = f"{param}: {count} messages, parts and calls do not fit into the context of {most} tokens"
            raise PromptTooLong(sentence, param)

    def reply_name(self, name: str | None) -> str:
        """Return the model's name for a reply: an adapter by the name in the request, the model by its first name."""
        adapter = self.adapters.find(name)
        return self.model_name if adapter is None else adapter.name

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; no name means the model that is served.

        Raises:
            ModelNotFound: naming the model.
        """
        if name is not None and name not in self.names and self.adapters.find(name) is None:
            raise ModelNotFound(
                f"the model `{name[:200]}` does not exist; this server has `{self.model_name}`", "model"
            )


def _num_inside(message: dict[str, Any]) -> int:
    """Return the number of parts and calls of a message, in any API's form."""
    return sum(len(inside) for name in ("content", "tool_calls") if isinstance(inside := message.get(name), list))
