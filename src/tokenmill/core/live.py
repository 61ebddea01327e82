"""Messages that show an engine's iterations, requests and cached prefixes live: small, without any text of prompts."""

from __future__ import annotations

import msgspec

from tokenmill.core.part_messages import EngineMessage, Message


class LiveTurn(msgspec.Struct, array_like=True):
    """One iteration of the engine's loop.

    Attributes:
        number: of the iterations that were kept, from 1.
        step: the step that it launched; 0: none.
        at: its begin, in seconds of the machine's monotonic clock. The next three are the seconds of its parts.
        num_decode_tokens: tokens of rows that lacked one token, without the `num_draft_tokens` behind these.
        num_prefill_tokens: tokens of all other rows.
        num_brought: tokens brought by the step that the iteration committed.
        waiting: the reason why the first of the waiting requests waits.
        error: the reason why a step failed.
        admitted: requests that took a row: id, row, tokens of the prompt, tokens computed before.
        chunks: requests that ran several tokens: id and how many.
        first: requests whose first token it brought.
        arrived: ids of new requests, and the tokens of their prompts.
        ended: ids of requests that ended, and the reason.
    """

    number: int
    at: float
    schedule: float
    run: float
    commit: float
    num_brought: int
    waiting: str
    error: str
    preempted: list[str]
    arrived: list[tuple[str, int]]
    ended: list[tuple[str, str]]
    step: int = 0
    num_requests: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0
    num_new_pages: int = 0
    admitted: list[tuple[str, int, int, int]] = []
    chunks: list[tuple[str, int]] = []
    first: list[str] = []


class LiveRequest(msgspec.Struct, array_like=True):
    """The current state of a request, in the words of `Request`. `row` -1: it has no row.

    Attributes:
        num_left_tokens: that it may still write until its limit.
        arrived_at, row_at, first_at: when it arrived, took its row and got its first token, in seconds of the clock of
            `LiveTurn.at`; 0: not yet, or not known.
        deadline: when its client gives it up, by the same clock; 0: its client has not said.
    """

    id: str
    status: str
    row: int
    wait_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrived_at: float = 0.0
    row_at: float = 0.0
    first_at: float = 0.0
    num_left_tokens: int = 0
    deadline: float = 0.0


class LiveSpan(msgspec.Struct, array_like=True):
    """A request that owned a row before the first iteration that is kept; times as in `LiveRequest`."""

    id: str
    row: int
    since: float
    num_prompt_tokens: int
    arrived_at: float
    first_at: float


class LiveNode(msgspec.Struct, array_like=True):
    """An edge of the radix tree: `parent` is the number of the one above it, -1 where that is a root.

    Attributes:
        num_users: requests that use it.
        age: steps since its last use.
    """

    number: int
    parent: int
    num_tokens: int
    num_users: int
    age: int


# Of one `LiveReport`: who has fallen behind asks again.
MOST_TURNS = 128
# As `since`: no iteration is wanted.
ALL_KNOWN = (1 << 62) - 1


class ShowTurns(Message):
    """Ask for the iterations of an engine's loop since a given one; answered with `LiveReport`.

    Attributes:
        since: the number of the last iteration that the asker knows; 0: none.
        shows_requests, shows_tree: whether these are wanted too.
        prefix: the number of a `LiveNode` whose first token ids are wanted; -1: of none.
    """

    id: str
    since: int
    shows_requests: bool
    shows_tree: bool
    prefix: int = -1


class LiveReport(EngineMessage, kw_only=True):
    """Reply to `ShowTurns`: iterations in order, up to number `num_iterations`; the asker may have to ask for more.

    Attributes:
        now: the engine's clock, that of `LiveTurn.at`.
        requests, tree: None if not asked for. Both are bounded: of `num_requests` requests, the first.
        kept_since: when the first of the iterations that the engine still keeps began; 0: it keeps none.
        owners: who owned rows just before.
        prefix: token ids; empty: there is no such edge, or none was asked for.
    """

    id: str
    now: float
    num_turns: int
    turns: list[LiveTurn]
    requests: list[LiveRequest] | None = None
    num_requests: int = 0
    tree: list[LiveNode] | None = None
    kept_since: float = 0.0
    owners: list[LiveSpan] = msgspec.field(default_factory=list)
    prefix: list[int] = msgspec.field(default_factory=list)
