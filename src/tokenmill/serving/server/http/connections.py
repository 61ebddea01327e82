"""Track the open connections: how long each may be silent, how many there may be, and which one gives way.

    accepted -> handshake -> |   head   -> |   body   -> answer   -> idle -> head ...
                              head_seconds  body_seconds  no limit    idle_seconds

When all places are taken, a newcomer gets that of the connection from which a head has been awaited longest: silence
holds no place. Some places are kept for requests that are answered at once however many connections there are:
monitoring must get through.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from tokenmill.config.configs import ServerConfig

SWEEP_SECONDS = 0.25
REPORT_SECONDS = 60.0
# Connections that no request but one on an open route can have; of few connections, a quarter.
RESERVE = 64


class SilenceLimits(msgspec.Struct, frozen=True):
    """Seconds within which a head must be complete, a body (a large one has more), and the next request must begin."""

    head: float
    body: float
    idle: float

    @classmethod
    def from_config(cls, config: ServerConfig) -> SilenceLimits:
        """Return the limits that the flags set."""
        return cls(config.head_timeout, config.body_timeout, config.keep_alive_timeout)


class Connection(Protocol):
    """One connection, as far as this module uses it.

    Attributes:
        due: the time (see `Connections.now`) at which its client has been silent for too long; infinite: no limit.
    """

    due: float

    def time_out(self) -> None:
        """Close because the client was silent too long, and say why if a request has begun."""
        ...

    def give_way(self) -> None:
        """Close at once."""
        ...


class Connections:
    """The open connections of one HTTP server.

    Attributes:
        now: seconds for which this process could have heard its clients. The clock stands still while it is stopped:
            clients that send meanwhile are not silent.
        show: called with the number of connections when it changes; None: not called.
        occupied: set while there are connections.
    """

    def __init__(self, limits: SilenceLimits, max_open: int, tell: Callable[[str], None]) -> None:
        """Track up to `max_open` connections; `tell` gets a line about refused ones, at most one a minute."""
        self.limits = limits
        self.now = 0.0
        self.show: Callable[[int], None] | None = None
        self.occupied = asyncio.Event()
        self._max_open = max_open
        self._max_with_request = max_open - min(RESERVE, max_open // 4)
        self._tell = tell
        self._open: set[Connection] = set()
        self._awaited: dict[Connection, None] = {}  # the longest first
        self._num_refused = 0
        self._next_report = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> None:
        """Add an accepted connection; if there is no place left for it, another gives way."""
        if len(self._open) >= self._max_open and self._awaited:
            longest = next(iter(self._awaited))
            self.leave(longest)
            longest.give_way()
            self.note_refused(f"{self._max_open} connections are open; one that sent nothing was closed for another")
        self._open.add(connection)
        self._has_changed()
        self.expect_request(connection, self.limits.head)

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self._awaited.pop(connection, None)
        self._has_changed()

    def _has_changed(self) -> None:
        if self._open:
            self.occupied.set()
        else:
            self.occupied.clear()
        if self.show is not None:
            self.show(len(self._open))

    def expect_request(self, connection: Connection, seconds: float) -> None:
        """Give a client some seconds to send; meanwhile its connection may have to give way."""
        if connection in self._open:
            self._awaited.pop(connection, None)
            self._awaited[connection] = None
            connection.due = self.now + seconds

    def admit_request(self, connection: Connection) -> bool:
        """Note a complete head; return False if too many have requests, so that only open routes are answered."""
        if connection in self._awaited:
            if len(self._open) - len(self._awaited) >= self._max_with_request:
                return False
            del self._awaited[connection]
        connection.due = math.inf
        return True

    def note_surplus(self) -> None:
        """Count a request that was refused because it was not admitted."""
        self.note_refused(f"{self._max_with_request} connections have requests, which is the most")

    def note_refused(self, reason: str) -> None:
        """Count a refused connection or request, and report now and then."""
        self._num_refused += 1
        if self.now >= self._next_report:
            self._tell(f"connections: {reason}; {self._num_refused} refused since the last such line")
            self._num_refused = 0
            self._next_report = self.now + REPORT_SECONDS

    async def watch(self) -> None:
        """Close connections that are silent for too long, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self.occupied.wait()
            last = clock()
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(clock() - last)

    def sweep(self, elapsed: float) -> None:
        """Close connections that are silent for too long, `elapsed` seconds after the last call."""
        self.now += min(elapsed, 2 * SWEEP_SECONDS)
        for connection in [one for one in self._open if one.due <= self.now]:
            connection.time_out()
