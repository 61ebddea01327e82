"""What the routes share: the engine's client, the model's name and limits, and how the server is doing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.vision import MediaLimits
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidRequest, PromptTooLong
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


@dataclass(frozen=True, slots=True)
class ToolParsers:
    """What the server was started with: `--tool-call-parser`, `--enable-auto-tool-choice`, `--reasoning-parser`."""

    notation: str = ""
    finds_calls: bool = False
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """One per server.

    Attributes:
        calls: what is open, in all API processes.
        engines: the way to ask the engines themselves.
        ready: what the engine said of itself when it became ready; of several, the one with the shortest context.
        model_name: the model's id in the API, which replies bear.
        model_names: see `names`; none: `model_name` alone.
        default_sampling: sampling parameters where a request gives none.
        parsers: how the text of chat answers is taken apart.
        takes_priority: requests may bring a priority; else it would be ignored.
        settings: the flags, as far as operators may see them over HTTP: no keys, no paths.
        started: Unix time of the start.
        trouble: why the server is not healthy now; None when it is.
        tokenizer_info: what /tokenizer_info says; it reads files.
        log: where a line about each request goes; None: nowhere.
        bodies: the memory that bodies on their way may take.
        batches: what keeps files and batches; None: nothing does.
        live: shows what the engines do; None: nothing does.
        adapters: what requests may name besides the model.
        media: fetches the images that they name.
        responses: those of /v1/responses that can be asked for again.
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
    bodies: BodyBudget = field(default_factory=BodyBudget)
    batches: BatchService | None = None
    fleet: Fleet | None = None
    live: LiveHub | None = None
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    media: MediaFetcher = field(default_factory=lambda: MediaFetcher((), MediaLimits()))
    responses: ResponseStore = field(default_factory=ResponseStore)

    @property
    def names(self) -> tuple[str, ...]:
        """All the ids that requests may call the model by."""
        return self.model_names or (self.model_name,)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when the software or the way the model is served does."""
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

    def check_priority(self, priority: int | None) -> int:
        """The priority to run a request with.

        Raises:
            InvalidRequest: one was asked for, but the engine serves in order of arrival.
        """
        if priority and not self.takes_priority:
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", "priority")
        return priority or 0

    def check_count(self, messages: str | Sequence[dict[str, Any]] | None, param: str = "messages") -> None:
        """Refuse more messages, with their parts and calls, than the context has tokens, before anything else is done.

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
        """What a reply calls the model that a request has named: an adapter as it did, the model by its first name."""
        adapter = self.adapters.find(name)
        return self.model_name if adapter is None else adapter.name

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name; no name means the one that is served.

        Raises:
            ModelNotFound: naming the model.
        """
        if name is not None and name not in self.names and self.adapters.find(name) is None:
            raise ModelNotFound(
                f"the model `{name[:200]}` does not exist; this server has `{self.model_name}`", "model"
            )


def _num_inside(message: dict[str, Any]) -> int:
    """Parts and calls of a message, in any API's form."""
    return sum(len(inside) for name in ("content", "tool_calls") if isinstance(inside := message.get(name), list))
