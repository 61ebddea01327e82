"""Keep sessions: conversations that the server remembers, in bounded memory, each for the key that opened it.

    opened ─> turn ─> turn ─> ... ─> closed by its owner, or after `idle_timeout` seconds without a turn

One turn of a session runs at a time; further input waits in order. A turn joins the session when its reply is complete,
and leaves it as it was otherwise. Knows neither HTTP nor engines: their KV is found again by its tokens.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.core.errors import Conflict, NotFound, QueueFull, TooLarge, Unavailable

MAX_SESSIONS = 1024
MAX_OF_OWNER = 256
MAX_WAITING = 16
MAX_SESSION_BYTES = 16 * 2**20
MAX_BYTES = 256 * 2**20
IDLE_SECONDS = 600.0
# How many bytes a kept token counts as.
TOKEN_BYTES = 8

Kind = Literal["chat", "text"]
_ID = re.compile(r"sess_[0-9a-f]{24}")


def is_session_id(name: str) -> bool:
    """Return True for a name that this server may have given a session; other names are labels of clients."""
    return _ID.fullmatch(name) is not None


class Turn:
    """One input of a session, from its acceptance to its end.

    Attributes:
        label: the id of the call that brought it.
        begins: done once all earlier turns are over; fails if the turn is aborted before.
        is_aborted: its owner has ended it.
        end_requests: ends the requests of the running turn with what they have so far; None: it has none yet.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_aborted = False
        self.end_requests: Callable[[], None] | None = None

    @property
    def has_begun(self) -> bool:
        """True while it is the one that runs."""
        return self.begins.done() and not self.begins.cancelled() and self.begins.exception() is None

    def abort(self, error: Exception) -> None:
        """End the turn: with an error if it waits, else with what it has so far."""
        self.is_aborted = True
        if not self.begins.done():
            self.begins.set_exception(error)
            self.begins.exception()  # its reader may have left
        elif self.end_requests is not None:
            self.end_requests()


class Session:
    """One conversation: the messages of a chat, or the tokens of a text.

    Attributes:
        messages, token_ids: all complete turns, in the form of its kind; the other stays empty.
        num_bytes: what they count as.
        turns: the turns that are not over; the first one runs.
        expires: Unix time at which it ends without another turn; None while one is open.
    """

    def __init__(self, owner: str, kind: Kind, idle_timeout: float, expired: Callable[[Session], None]) -> None:
        """Open a session; `expired` is called when it has been idle for too long."""
        self.id = f"sess_{secrets.token_hex(12)}"
        self.owner = owner
        self.kind: Kind = kind
        self.created = int(time.time())
        self.idle_timeout = idle_timeout
        self.messages: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.num_bytes = self.num_turns = 0
        self.turns: deque[Turn] = deque()
        self.expires: float | None = None
        self._expired = expired
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._wait_for_input()

    def accept(self, label: str) -> Turn:
        """Accept a turn, which begins when all earlier ones are over.

        Raises:
            QueueFull: too many wait already.
        """
        if len(self.turns) > MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} inputs of this session wait already; send the next one later")
        self._stop_timer()
        turn = Turn(label)
        self.turns.append(turn)
        self._begin_next()
        return turn

    def end(self, turn: Turn) -> None:
        """Take in that a turn is over, and let the next one begin."""
        self.turns.remove(turn)
        self._begin_next()
        if not self.turns and not self._is_closed:
            self._wait_for_input()

    def check_room(self, num_bytes: int) -> None:
        """Refuse input of so many bytes that does not fit.

        Raises:
            TooLarge: the session would be too long.
        """
        if self.num_bytes + num_bytes > MAX_SESSION_BYTES:
            raise TooLarge(f"the session would hold more than {MAX_SESSION_BYTES} bytes: open another one")

    def abort(self) -> int:
        """End all open turns; return how many there were."""
        error = Conflict("the session's turns were aborted before this one was complete: send the input again")
        for turn in self.turns:
            turn.abort(error)
        return len(self.turns)

    def close(self) -> None:
        """End all open turns, and stop waiting for further ones."""
        self._is_closed = True
        self.abort()
        self._stop_timer()

    def _begin_next(self) -> None:
        if not any(turn.has_begun for turn in self.turns):
            following = next((turn for turn in self.turns if not turn.is_aborted), None)
            if following is not None:
                following.begins.set_result(None)

    def _stop_timer(self) -> None:
        self.expires = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for_input(self) -> None:
        self.expires = time.time() + self.idle_timeout
        self._timer = asyncio.get_running_loop().call_later(self.idle_timeout, self._expired, self)


class SessionStore:
    """All sessions of a server.

    When there is no room, the owner that holds most loses its least recently used idle session.

    Attributes:
        ended: how many sessions have ended, by reason: closed, expired, evicted.
        turns: how many turns are over, by outcome: kept or dropped.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter(closed=0, expired=0, evicted=0)
        self.turns: Counter[str] = Counter(kept=0, dropped=0)
        self._sessions: dict[str, Session] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, owner: str, kind: Kind, idle_timeout: float = IDLE_SECONDS) -> Session:
        """Open a session.

        Raises:
            QueueFull: the owner has too many.
            Unavailable: there are too many, and none is idle.
        """
        if len(self.of(owner)) >= MAX_OF_OWNER:
            raise QueueFull(f"this key has {MAX_OF_OWNER} open sessions already: close one first")
        while len(self._sessions) >= MAX_SESSIONS:
            if not self._evict():
                raise Unavailable("too many sessions are open; try again later")
        session = Session(owner, kind, idle_timeout, lambda it: self._end(it, "expired"))
        self._sessions[session.id] = session
        return session

    def get(self, owner: str, session_id: str) -> Session:
        """Return the owner's session of this id.

        Raises:
            NotFound: the owner has no such session.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise NotFound("no open session has this id", "session_id")
        return session

    def of(self, owner: str) -> list[Session]:
        """Return the owner's sessions, the least recently used first."""
        return [session for session in self._sessions.values() if session.owner == owner]

    def with_turn(self, owner: str, label: str) -> tuple[Session, Turn] | None:
        """Return the owner's session that has an open turn of this label, and the turn."""
        found = ((session, turn) for session in self.of(owner) for turn in session.turns if turn.label == label)
        return next(found, None)

    def close(self, session: Session) -> None:
        """End a session and its open turns."""
        self._end(session, "closed")

    def end_turn(self, session: Session, turn: Turn, is_kept: bool) -> None:
        """Take in that a turn is over; see `Session.end`."""
        self.turns["kept" if is_kept else "dropped"] += 1
        session.end(turn)
        if session.id in self._sessions:
            self._sessions[session.id] = self._sessions.pop(session.id)

    def keep_messages(self, session: Session, messages: Sequence[dict[str, Any]], num_bytes: int) -> None:
        """Add a turn to a chat."""
        session.messages += messages
        self._grow(session, num_bytes)

    def keep_tokens(self, session: Session, token_ids: Sequence[int]) -> None:
        """Replace the tokens of a text by itself with another turn."""
        before, session.token_ids = len(session.token_ids), list(token_ids)
        self._grow(session, TOKEN_BYTES * (len(token_ids) - before))

    def _grow(self, session: Session, num_bytes: int) -> None:
        session.num_turns += 1
        session.num_bytes += num_bytes
        while sum(one.num_bytes for one in self._sessions.values()) > MAX_BYTES and self._evict():
            pass

    def _evict(self) -> bool:
        """End the least recently used idle session of the owner that holds most; return False if none is idle."""
        idle = [session for session in self._sessions.values() if not session.turns]
        if not idle:
            return False
        held: Counter[str] = Counter()
        for session in self._sessions.values():
            held[session.owner] += session.num_bytes + 1
        most = max((session.owner for session in idle), key=held.__getitem__)
        self._end(next(session for session in idle if session.owner == most), "evicted")
        return True

    def _end(self, session: Session, reason: str) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self.ended[reason] += 1
            session.close()


class SessionCollector(Collector):
    """Shows the numbers of a store as metrics, at the moment of a scrape."""

    def __init__(self, prefix: str, store: SessionStore) -> None:
        self._prefix = prefix
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield the number of open sessions, of turns by outcome, and of ended sessions by reason."""
        yield GaugeMetricFamily(f"{self._prefix}:num_sessions", "Open sessions", value=len(self._store))
        yield self._counter("session_turns", "Turns of sessions that are over", "outcome", self._store.turns.items())
        yield self._counter("sessions_ended", "Sessions that have ended", "reason", self._store.ended.items())

    def _counter(self, name: str, help: str, label: str, counts: Iterable[tuple[str, int]]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", help, labels=[label])
        for value, count in counts:
            family.add_metric([value], count)
        return family
