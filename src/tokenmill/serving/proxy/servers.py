"""Choose among servers of one kind: which is asked next, and which rests because it has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# For so long a server that could not be reached is asked after all others only.
REST_SECONDS = 2.0


@dataclass(slots=True)
class Server:
    """One server; `num_open`: the requests of ours that it has."""

    url: str
    num_open: int = 0
    rests_until: float = 0.0


class Servers:
    """Servers that can stand in for each other."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = [Server(url.rstrip("/")) for url in urls]
        self._clock = clock

    def in_turn(self) -> list[Server]:
        """Return all servers in the order to ask them: those that have not failed lately, then by fewest requests."""
        now = self._clock()
        return sorted(self._servers, key=lambda server: (server.rests_until > now, server.num_open))

    def fit(self) -> list[Server]:
        """Return the servers in this order without those that have failed lately."""
        now = self._clock()
        return [server for server in self.in_turn() if server.rests_until <= now]

    def failed(self, server: Server) -> None:
        """Let a server rest that could not be reached."""
        server.rests_until = self._clock() + REST_SECONDS

    @contextmanager
    def serving(self, server: Server) -> Iterator[None]:
        """Count one more open request of a server inside."""
        server.num_open += 1
        try:
            yield
        finally:
            server.num_open -= 1
