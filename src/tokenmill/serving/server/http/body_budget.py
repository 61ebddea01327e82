"""Bound the memory that bodies take together from their first byte until they are parsed.

When the budget is used up, the body that holds most gives way, so clients that send much take no room from clients
that send little. Only bytes that have come count, not the length that a client announces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tokenmill.serving.server.http.body_threads import BodyThreads
from tokenmill.serving.server.http.errors import ServerBusy
from tokenmill.serving.server.http.unknown_fields import UnknownFields

DEFAULT_MAX_BYTES = 256 << 20


class IncomingBody:
    """The bytes of one body that have come so far."""

    def __init__(self, budget: BodyBudget, patience: asyncio.Timeout) -> None:
        self.data = bytearray()
        self._budget = budget
        self._patience = patience

    def add(self, part: bytes) -> None:
        """Append a part.

        Raises:
            ServerBusy: there is no room and no other body holds more, or this body had to give way.
        """
        self._budget.count(self, len(part))
        self.data += part

    def give_way(self) -> None:
        """Free its memory at once, and end its reader when the event loop gets to it."""
        self.data = bytearray()
        self._patience.reschedule(asyncio.get_running_loop().time())


class BodyBudget:
    """The memory that incoming bodies share.

    Attributes:
        threads: where long bodies are read.
        unknown: the rule for fields that are not known.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, unknown: UnknownFields | None = None) -> None:
        self.max_bytes = max_bytes
        self.unknown = unknown or UnknownFields()
        self.threads = BodyThreads()
        self._num_bytes = 0
        self._incoming: set[IncomingBody] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[IncomingBody]:
        """Open a body that counts towards the budget until it is closed.

        Raises:
            ServerBusy: the body had to give way to another.
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
        """Count bytes that a body is about to add, and make room for them; see `IncomingBody.add`."""
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
