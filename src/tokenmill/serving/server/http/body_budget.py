"""The memory that bodies take together from their first byte until they are parsed.

Whatever comes beyond the budget, the body that holds most gives way, so those who send much make no room from those
who send little. What is sent counts, not what is announced: an announcement costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tokenmill.serving.server.http.body_threads import BodyThreads
from tokenmill.serving.server.http.errors import ServerBusy

DEFAULT_MAX_BYTES = 256 << 20


class IncomingBody:
    """What has come of one body."""

    def __init__(self, budget: BodyBudget, patience: asyncio.Timeout) -> None:
        self.data = bytearray()
        self._budget = budget
        self._patience = patience

    def add(self, part: bytes) -> None:
        """Take in a part.

        Raises:
            ServerBusy: there is no room, and no other body holds more; or this one had to give way.
        """
        self._budget.count(self, len(part))
        self.data += part

    def give_way(self) -> None:
        """Let its memory go at once, and its reader when it is its turn."""
        self.data = bytearray()
        self._patience.reschedule(asyncio.get_running_loop().time())


class BodyBudget:
    """One per server.

    Attributes:
        threads: where long bodies are read.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.threads = BodyThreads()
        self._num_bytes = 0
        self._incoming: set[IncomingBody] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[IncomingBody]:
        """Room for a body, which is returned at the end.

        Raises:
            ServerBusy: the body had to give way to others.
        """
        patience = asyncio.timeout(None)
        body = IncomingBody(self, patience)
        self._incoming.add(body)
        try:
            async with patience:
                yield body
        except TimeoutError:
            if not patience.expired():
                raise
            raise self._busy() from None
        finally:
            self._forget(body)

    def count(self, body: IncomingBody, num_bytes: int) -> None:
        """A body is about to grow by so much; see `IncomingBody.add`."""
        if body not in self._incoming:
            raise self._busy()
        while self._num_bytes + num_bytes > self.max_bytes:
            largest = max(self._incoming, key=lambda one: len(one.data))
            if len(largest.data) <= len(body.data) + num_bytes:
                raise self._busy()
            self._forget(largest)
            largest.give_way()
        self._num_bytes += num_bytes

    def _forget(self, body: IncomingBody) -> None:
        if body in self._incoming:
            self._incoming.remove(body)
            self._num_bytes -= len(body.data)

    def _busy(self) -> ServerBusy:
        return ServerBusy(
            f"the bodies of requests on their way take all of the {self.max_bytes >> 20} MiB that they may take "
            "together (--max-body-bytes-in-flight); try again later"
        )
