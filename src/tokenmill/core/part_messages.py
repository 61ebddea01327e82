"""Messages about the parts of a server themselves: their signs of life, their deaths, and who takes their place.

`part` is the name of an inbox. See `messages.py` for the others.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


class EngineMessage(Message, kw_only=True):
    """Base of what an engine says to the API process. `engine` is its index, which its process fills in."""

    engine: int = 0


class Ping(Message):
    """Asks a loop whether it still takes messages; answered with `Pong` when its turn comes."""


class Pong(Message):
    """Reply to `Ping`, by the part that was asked."""

    part: str


class Beat(Message, kw_only=True):
    """Sent every second by a thread beside a loop. `job` is what it has been busy with for so many `seconds`, of which
    `limit` are allowed; empty: it waits for work. `num_dropped` counts messages that its inbox could not read,
    `num_lost_lines` lines of its log that could not be written."""

    part: str
    job: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    num_dropped: int = 0
    num_lost_lines: int = 0


class PartFailed(Message):
    """A part cannot start or cannot go on; `exit_code` is what the command should end with."""

    part: str
    error: str
    exit_code: int


class EngineLost(Message):
    """An engine has died: what it had is another's, or waits for `EngineBack`.

    Attributes:
        suspects: requests that ran when it died; each is tried again alone.
        convicted: those that were there at two deaths, and nothing else was at both; they end with an error.
        is_removed: it will not come back.
    """

    engine: int
    suspects: list[str] = []
    convicted: list[str] = []
    is_removed: bool = False


class EngineBack(Message):
    """An engine takes requests, at this inbox."""

    engine: int
    inbox: str


class EngineDraining(Message):
    """An engine gets no new requests.

    Attributes:
        is_bound: those that it has stay with it even if it dies, since no other has its weights.
    """

    engine: int
    is_bound: bool = False


class EngineIdle(Message):
    """A draining engine has no request of this text worker any more."""

    engine: int
    worker: str


class LeaveWorker(Message):
    """A text worker has died: its requests end without an answer, since they will come again by another."""

    worker: str


class WatchEngine(Message):
    """A text worker that has several engines to choose from wants to be told how this one is, with `EngineReport`s."""

    worker: str


class EngineReport(Message, kw_only=True):
    """What a text worker chooses engines by: sent after each step that changed the prefix cache, and ten times a second
    while there are requests, before the outputs of that step.

    Attributes:
        engine, source: the engine and its inbox, which its process fills in.
        changes: the names of pages that came into the cache (True) or went, in order.
        is_first: `changes` are all that it has.
        num_taken: requests of this text worker that it has been sent since the first report.
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
    """These suspects of an engine's death have gone on without harm, or have ended."""

    ids: list[str]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the death of a part says of the requests that it had in the works; see `EngineLost`."""

    suspects: list[str] = []
    convicted: list[str] = []

    @property
    def said(self) -> str:
        """Who is convicted, as a sentence of the log goes on; empty: nobody."""
        return f"; request {' '.join(self.convicted)} is not tried again" if self.convicted else ""


class Retrial(Message):
    """The text worker before this one died while it prepared calls: each comes once more, before all others, and is
    prepared alone. An id stands for its whole call.

    Attributes:
        suspects: these; they are `Cleared` one by one.
        ended: nobody waits for these any more; they are `Cleared` at once.
    """

    suspects: list[str]
    ended: list[str]


EngineNews = EngineLost | EngineBack | EngineDraining
SignOfLife = Beat | Pong
FromPart = Cleared | EngineIdle | SignOfLife | PartFailed
