"""Store responses that clients can retrieve later, each for the key that it came by: in memory, or in a folder.

Memory is bounded. When there is no room, the owner that holds most loses its least recently used responses. So each of
n owners keeps an n-th of the room whatever the others do, and a single owner has all of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tokenmill.serving.server.response_files import ResponseFiles, StoredResponse

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner, the least recently used first."""

    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseMemory:
    """Responses in memory, bounded in number and bytes over all owners; one larger than all of it is not kept."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, replacing one of the same id."""
        response_id = stored.response["id"]
        self.drop(owner, response_id)
        if stored.num_bytes > self._max_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.stored[response_id] = stored
        shelf.num_bytes += stored.num_bytes
        while sum(one.num_bytes for one in self._shelves.values()) > self._max_bytes:
            self._drop_oldest(max(self._shelves, key=lambda name: self._shelves[name].num_bytes))
        while sum(len(one.stored) for one in self._shelves.values()) > self._max_responses:
            self._drop_oldest(max(self._shelves, key=lambda name: len(self._shelves[name].stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response of this id, if it is still stored."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.stored:
            return None
        shelf.stored.move_to_end(response_id)
        return shelf.stored[response_id]

    def drop(self, owner: str, response_id: str) -> bool:
        """Forget the owner's response of this id; return False if there is no such response."""
        shelf = self._shelves.get(owner)
        stored = None if shelf is None else shelf.stored.pop(response_id, None)
        if shelf is None or stored is None:
            return False
        shelf.num_bytes -= stored.num_bytes
        if not shelf.stored:
            del self._shelves[owner]
        return True

    def _drop_oldest(self, owner: str) -> None:
        self.drop(owner, next(iter(self._shelves[owner].stored)))


class ResponseStore:
    """The stored responses of a server; with files, those that are complete outlive it.

    Memory has what is not complete yet, and what the disk did not take.

    Attributes:
        tasks: the tasks that make the responses not yet complete, by their ids.
    """

    def __init__(self, files: ResponseFiles | None = None, memory: ResponseMemory | None = None) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._files = files
        self._memory = memory or ResponseMemory()
        # One thread, so that what is put and dropped stays in order.
        self._thread = ThreadPoolExecutor(1, "responses")

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, replacing one of the same id."""
        self._memory.put(owner, stored)
        if self._files is not None and stored.is_complete:
            writing = asyncio.get_running_loop().run_in_executor(self._thread, self._files.put, owner, stored)
            writing.add_done_callback(lambda done: self._written(done, owner, stored))

    def _written(self, writing: asyncio.Future[None], owner: str, stored: StoredResponse) -> None:
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            _logger.warning("a response is kept in memory alone: %s", error)
        elif self._memory.get(owner, stored.response["id"]) is stored:
            self._memory.drop(owner, stored.response["id"])

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response of this id, if it is still stored."""
        stored = self._memory.get(owner, response_id)
        if stored is not None or self._files is None:
            return stored
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._files.get, owner, response_id)

    async def drop(self, owner: str, response_id: str) -> bool:
        """Forget the owner's response of this id; return False if there is no such response."""
        is_dropped = self._memory.drop(owner, response_id)
        if self._files is None:
            return is_dropped
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, self._files.drop, owner, response_id) or is_dropped

    async def close(self) -> None:
        """Wait until the disk has what was put."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
