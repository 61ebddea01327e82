"""The API process's record of a request from its arrival to its end, and the observer that it reports to.

From the records come the messages for the successor of a text worker that has died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tokenmill.core.api_messages import FinishedRequest, PrefixChange, PrefixNote
from tokenmill.core.messages import GenerateText, ToWorker
from tokenmill.core.part_messages import Retrial, Verdict
from tokenmill.core.request import FinishReason
from tokenmill.core.text_queries import TextQuery, TextReply
from tokenmill.serving.frontend.generation import Generation


class Caller(msgspec.Struct, frozen=True):
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
        change: the change that broke its cached prefix.
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
    change: PrefixChange | None = None

    @property
    def note(self) -> PrefixNote | None:
        """The fate of its cached prefix, if there is something to say about it."""
        has_any = self.prompt.volatile or self.change is not None
        return PrefixNote(self.prompt.volatile, self.change) if has_any else None

    def finished(self, reason: FinishReason, is_first: bool) -> FinishedRequest:
        """Return what observers are told of its end, which is now; `is_first`: of those with the same prompt."""
        return FinishedRequest(
            label=self.caller.label,
            trace=self.caller.trace,
            reason=reason,
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_output=self.first_output,
            last_output=self.last_output,
            ended=time.monotonic(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            volatile=self.prompt.volatile if is_first else [],
            prefix_change="" if self.change is None else self.change.cause,
            is_pooled=self.prompt.pooling is not None,
        )


class Call(msgspec.Struct, frozen=True):
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


def messages_again(requests: Mapping[str, OpenRequest], calls: Iterable[Call], verdict: Verdict) -> list[ToWorker]:
    """Return the messages that these requests and calls came with, to be sent again: suspects first.

    Args:
        requests: the text worker's requests, by their ids.
        verdict: the verdict of its death on the calls that it prepared.
    """
    resumed: dict[str, tuple[GenerateText, dict[str, list[list[int]]]]] = {}
    for request_id, request in requests.items():
        resumed.setdefault(request.prompt.ids[0], (request.prompt, {}))[1][request_id] = request.deltas
    messages: dict[str, ToWorker] = {
        first: msgspec.structs.replace(prompt, resumed=deltas) for first, (prompt, deltas) in resumed.items()
    }
    messages |= {call.message.id: call.message for call in calls}
    if not verdict.suspects:
        return list(messages.values())
    suspects = [one for one in verdict.suspects if one in messages]
    retrial = Retrial(suspects, ended=[one for one in verdict.suspects if one not in messages])
    return [retrial, *({one: messages[one] for one in suspects} | messages).values()]
