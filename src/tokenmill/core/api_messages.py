"""Messages between the API processes of a server, where several serve one listening socket.

The first starts engines and text workers and tells the others, its API workers, their state. An API worker gets the
outputs of its requests from text workers of its own, and reports its clients' latencies to the first. See `messages.py`
for the other messages.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.histogram import Histogram
from tokenmill.core.part_messages import EngineNews, Message, Verdict
from tokenmill.core.request import FinishReason


class PrefixChange(msgspec.Struct, kw_only=True):
    """A change from the last prompt of a conversation, behind which the prefix cache could supply nothing.

    Attributes:
        cause: the name of a rule of `volatile_blocks`, or "unknown".
        position: the first token that differs.
        num_equal: tokens behind the change that are as before.
        num_cached: tokens that the cache supplied.
        was, now: the texts of the change with 40 characters on both sides.
    """

    cause: str
    position: int
    num_equal: int
    was: str
    now: str
    num_cached: int = 0


class PrefixNote(msgspec.Struct):
    """The fate of a call's cached prefix: rules that moved or dropped blocks, and the change that broke it."""

    volatile: list[str]
    change: PrefixChange | None = None


class FinishedRequest(msgspec.Struct, array_like=True):
    """One request from its arrival to its end. Times are seconds of the machine's monotonic clock; 0: never reached.

    Attributes:
        label: the client's own name for its call.
        trace: the `traceparent` that its client sent; empty: none.
        scheduled: when it was first part of a step.
        volatile: the rules that moved or dropped blocks of its prompt, if it is the first of its call.
        prefix_change: the cause of the change that broke its cached prefix; empty: none did.
        is_pooled: it asked for a vector or scores.
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
    volatile: list[str] = msgspec.field(default_factory=list)
    prefix_change: str = ""
    is_pooled: bool = False


# --- API worker -> first ---------------------------------------------------------------------------------------------


class SiblingStarted(Message):
    """Report that an API worker takes messages, for the first time or after a restart."""

    index: int
    pid: int


class Observed(Message, kw_only=True):
    """Report the experience of an API worker's clients since the last report; sent every second.

    Attributes:
        num_open: its requests without a terminal output.
        num_lost_lines: log lines that it could not write, since it started.
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
    """Reply to `FindCalls`: a name and the open requests of each call that bears it, or "" and all open requests.

    `notes`: of the calls whose prefix there is something to say about, by the id of their first request.
    """

    id: str
    calls: list[tuple[str, list[str]]]
    notes: dict[str, PrefixNote] = msgspec.field(default_factory=dict)


class SiblingEnded(Message):
    """Report that an API worker which was told to stop has no open requests."""

    index: int


# --- first -> API worker -------------------------------------------------------------------------------------------


class ServeNow(Message):
    """Tell an API worker to serve: all parts are ready. Carries the inboxes of its text workers, by index."""

    workers: dict[int, str]


class WorkerBack(Message):
    """Tell an API worker that one of its text workers has been restarted; see `Owner.replaced`."""

    worker: int
    inbox: str
    retired: str
    news: list[EngineNews]
    verdict: Verdict = Verdict()


class WorkerTrouble(Message):
    """Report the state of a text worker of the receiver: deaf to messages for now, or lost and not to be waited for."""

    worker: int
    is_deaf: bool
    is_lost: bool


class ServerState(Message):
    """Tell API workers every second whether a part is being restarted."""

    is_recovering: bool


class ServerEnds(Message):
    """Report an error that ended the server."""

    exit_code: int
    error: str


class FindCalls(Message):
    """Ask for the open calls of an owner that bear these names, see `EngineClient.find`; without names: for all open
    requests of all owners.
    """

    id: str
    names: list[str]
    owner: str = ""


class AbortCalls(Message):
    """End those of these requests that are still open."""

    ids: list[str]


class AnswerCalls(Message):
    """End the thinking of those of these requests that are open; see `AnswerNow`."""

    ids: list[str]


FromSibling = SiblingStarted | Observed | FoundCalls | SiblingEnded
ForSibling = ServeNow | WorkerBack | WorkerTrouble | ServerState | ServerEnds | FindCalls | AbortCalls | AnswerCalls
