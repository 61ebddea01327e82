"""Messages about the parts of a server: their heartbeats, their deaths, and their replacements.

`part` is the name of an inbox. See `messages.py` for the others.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


class EngineMessage(Message, kw_only=True):
    """Base of the messages from an engine to the API process. `engine` is its index, which its process fills in."""

    engine: int = 0


class Ping(Message):
    """Ask a loop whether it still takes messages; it answers with `Pong`."""


class Pong(Message):
    """Reply to `Ping`, by the part that was asked."""

    part: str


class Beat(Message, kw_only=True):
    """Sent every second by a thread beside a loop. `job` is the loop's work for the last `seconds`, of which `limit`
    are allowed; empty: it waits for work. `num_dropped` counts messages that its inbox could not read, `num_lost_lines`
    log lines that could not be written. `rests`: it has waited for so long that no beat comes until there is a job.
    """

    part: str
    job: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    num_dropped: int = 0
    num_lost_lines: int = 0
    rests: bool = False


class PartFailed(Message):
    """Report that a part cannot start or cannot go on; `exit_code` is the exit code for the command."""

    part: str
    error: str
    exit_code: int


class EngineLost(Message):
    """Report that an engine has died: its requests go to another engine, or wait for `EngineBack`.

    Attributes:
        suspects: requests that ran when it died; each is tried again alone.
        convicted: the only requests present at two deaths; they end with an error.
        is_removed: it will not come back.
    """

    engine: int
    suspects: list[str] = []
    convicted: list[str] = []
    is_removed: bool = False


class EngineBack(Message):
    """Report that an engine takes requests, at this inbox."""

    engine: int
    inbox: str


class EngineDraining(Message):
    """Report that an engine gets no new requests.

    Attributes:
        is_bound: its requests stay with it even if it dies, since no other engine has its weights.
    """

    engine: int
    is_bound: bool = False


class EngineIdle(Message):
    """Report that a draining engine has no requests of this text worker left."""

    engine: int
    worker: str


class LeaveWorker(Message):
    """Tell an engine that a text worker has died: its requests end without an answer and are sent again by another."""

    worker: str


class WatchEngine(Message):
    """Ask an engine for `EngineReport`s, for a text worker that has several engines to choose from."""

    worker: str


class EngineReport(Message, kw_only=True):
    """The state by which a text worker chooses engines: sent after each step that changed the prefix cache, and ten
    times a second while there are requests, before the outputs of that step.

    Attributes:
        engine, source: the engine and its inbox, which its process fills in.
        changes: the names of pages that came into the cache (True) or went, in order.
        is_first: `changes` list the whole cache.
        num_taken: requests that this text worker has sent it since the first report.
        num_others: requests of other text workers that are in flight.
        num_queued_tokens: tokens of prompts in flight that are still to be computed.
    """

    engine: int = 0
    source: str = ""
    changes: list[tuple[bool, list[int]]] = []
    is_first: bool = False
    num_taken: int = 0
    num_others: int = 0
    num_queued_tokens: int = 0


class Cleared(Message):
    """Report that these suspects of an engine's death have gone on without harm, or have ended."""

    ids: list[str]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requests that the death of a part makes suspects or convicts; see `EngineLost`."""

    suspects: list[str] = []
    convicted: list[str] = []

    @property
    def said(self) -> str:
        """Clause on the convicted requests for a sentence of the log; empty: no request is convicted."""
        return f"; request {' '.join(self.convicted)} is not tried again" if self.convicted else ""


class Retrial(Message):
    """Tell a text worker that its predecessor died while it prepared calls: each comes once more, before all others,
    and is prepared alone. An id stands for its whole call.

    Attributes:
        suspects: these; they are `Cleared` one by one.
        ended: calls that no client waits for any more; they are `Cleared` at once.
    """

    suspects: list[str]
    ended: list[str]


EngineNews = EngineLost | EngineBack | EngineDraining
SignOfLife = Beat | Pong
FromPart = Cleared | EngineIdle | SignOfLife | PartFailed
