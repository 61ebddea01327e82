"""What the API process knows of a request from its arrival to its end, and whom it tells of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.messages import Decoded, DecodeTokens, Encoded, EncodeText, GenerateText
from tokenmill.core.request import FinishReason
from tokenmill.frontend.generation import Generation


@dataclass(slots=True)
class OpenRequest:
    """One request in flight, with all that another text worker needs to go on with it.

    Attributes:
        prompt: the message that it came with.
        deltas: the tokens of each output so far.
    """

    generation: Generation
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


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request from its arrival to its end. Times are seconds of the machine's monotonic clock; 0: it never was.

    Attributes:
        label: what its client knows its call by.
        trace: the `traceparent` that its client sent; empty: none.
        scheduled: when it was first part of a step.
    """

    label: str
    trace: str
    reason: FinishReason
    arrived: float
    scheduled: float
    first_output: float
    last_output: float
    ended: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


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
