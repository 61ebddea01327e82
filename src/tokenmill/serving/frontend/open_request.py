"""What the API process knows of a request from its arrival to its end, and whom it tells of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.api_messages import FinishedRequest
from tokenmill.core.messages import Decoded, DecodeTokens, Encoded, EncodeText, GenerateText
from tokenmill.serving.frontend.generation import Generation


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and how it is spoken of.

    Attributes:
        label: what clients know the call by; see `EngineClient.find`.
        trace: the `traceparent` header of the call, for who observes.
        tenant: who takes turns with others for the engine; empty: this call.
        owner: who may find the call: the hash of a key; empty: where there are no keys.
        is_background: it runs beside calls that somebody waits for, never before one.
    """

    label: str = ""
    trace: str = ""
    tenant: str = ""
    owner: str = ""
    is_background: bool = False


NOBODY = Caller()


@dataclass(slots=True)
class OpenRequest:
    """One request in flight, with all that another text worker needs to go on with it.

    Attributes:
        caller: whose call it is part of.
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
    """A question to a text worker."""

    worker: int
    message: EncodeText | DecodeTokens
    reply: asyncio.Future[Encoded | Decoded]


class RequestObserver(Protocol):
    """Told what clients experience, in seconds of a monotonic clock."""

    def first_token(self, seconds: float) -> None:
        """The first token came this long after the request."""
        ...

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Further tokens came this long after the ones before."""
        ...

    def finished(self, request: FinishedRequest) -> None:
        """The request ended."""
        ...
