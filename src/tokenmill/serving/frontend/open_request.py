"""The API process's record of a request from its arrival to its end, and the observer that it reports to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.api_messages import FinishedRequest
from tokenmill.core.messages import GenerateText, TextQuery, TextReply
from tokenmill.serving.frontend.generation import Generation


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and the names that it goes by.

    Attributes:
        label: the client's name for the call; see `EngineClient.find`.
        trace: the `traceparent` header of the call, for observers.
        tenant: the tenant that takes turns with others for the engine; empty: this call is its own.
        owner: the hash of the key that may find the call; empty without keys.
        is_background: the call runs beside interactive calls, never before one.
    """

    label: str = ""
    trace: str = ""
    tenant: str = ""
    owner: str = ""
    is_background: bool = False


NOBODY = Caller()


@dataclass(slots=True)
class OpenRequest:
    """One request in flight, with all that another text worker needs to continue it.

    Attributes:
        caller: the caller of its call.
        prompt: the message that it came with.
        deltas: the tokens of each output so far.
    """

    generation: Generation
    caller: Caller
    prompt: GenerateText
    worker: int
    arrived: float
    last_output: float
    first_output: float = 0.0
    scheduled: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    deltas: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Call:
    """An open question to a text worker, with the future of its reply."""

    worker: int
    message: TextQuery
    reply: asyncio.Future[TextReply]


class RequestObserver(Protocol):
    """Observes the latencies that clients experience, in seconds of a monotonic clock."""

    def first_token(self, seconds: float) -> None:
        """Record that the first token came this long after the request."""
        ...

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Record that further tokens came this long after the previous ones."""
        ...

    def finished(self, request: FinishedRequest) -> None:
        """Record a request that has ended."""
        ...
