"""Messages between the API processes of a server, where several serve one listening socket.

The first starts engines and text workers and knows how they are; its siblings are told. A sibling hears of its requests
from text workers of its own, and tells the first what its clients experience. See `messages.py` for the other messages.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.histogram import Histogram
from tokenmill.core.part_messages import EngineNews, Message, Verdict
from tokenmill.core.request import FinishReason


class FinishedRequest(msgspec.Struct, array_like=True):
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


# --- sibling -> first ---------------------------------------------------------------------------------------------


class SiblingStarted(Message):
    """A sibling takes messages, for the first time or after a death."""

    index: int
    pid: int


class Observed(Message, kw_only=True):
    """Sent every second: what the clients of a sibling have experienced since the last time.

    Attributes:
        num_open: its requests without a terminal output.
        num_lost_lines: lines of the log that it could not write, since it started.
        first_tokens: seconds from each request to its first token.
        between_tokens: seconds between tokens.
        finished: requests that have ended.
    """

    index: int
    num_open: int = 0
    num_lost_lines: int = 0
    first_tokens: list[float] = msgspec.field(default_factory=list)
    between_tokens: Histogram | None = None
    finished: list[FinishedRequest] = msgspec.field(default_factory=list)


class FoundCalls(Message):
    """Reply to `FindCalls`: a name and the open requests of each call that bears it, or "" and all open requests."""

    id: str
    calls: list[tuple[str, list[str]]]


class SiblingEnded(Message):
    """A sibling that was told to stop has no request any more."""

    index: int


# --- first -> sibling -------------------------------------------------------------------------------------------


class ServeNow(Message):
    """All parts are ready, of the engines each has been told; the inboxes of the receiver's text workers, by index."""

    workers: dict[int, str]


class WorkerBack(Message):
    """A text worker of the receiver has been started again; see `Owner.replaced`."""

    worker: int
    inbox: str
    retired: str
    news: list[EngineNews]
    verdict: Verdict = Verdict()


class WorkerTrouble(Message):
    """How a text worker of the receiver does: it takes no messages now, or nobody should go on waiting for it."""

    worker: int
    is_deaf: bool
    is_lost: bool


class ServerState(Message):
    """Sent every second: whether a part is being started again."""

    is_recovering: bool


class ServerEnds(Message):
    """Something has ended the server."""

    exit_code: int
    error: str


class FindCalls(Message):
    """Asks for the open calls of an owner that bear these names, see `EngineClient.find`; none named: for all open
    requests of anybody.
    """

    id: str
    names: list[str]
    owner: str = ""


class AbortCalls(Message):
    """End these requests, those of them that are open."""

    ids: list[str]


FromSibling = SiblingStarted | Observed | FoundCalls | SiblingEnded
ForSibling = ServeNow | WorkerBack | WorkerTrouble | ServerState | ServerEnds | FindCalls | AbortCalls
