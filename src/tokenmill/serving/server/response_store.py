"""Store responses that clients can retrieve later, in bounded memory, each for the key that it came by.

When there is no room, the owner that holds most loses its least recently used responses. So each of n owners keeps an
n-th of the room whatever the others do, and a single owner has all of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


class StoredResponse(msgspec.Struct, frozen=True):
    """One response; `messages` is the chat up to its answer without instructions, `num_bytes` its size."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    num_bytes: int


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner, the least recently used first."""

    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """A store bounded in number and bytes over all owners; a response larger than all of it is not kept.

    Attributes:
        tasks: the tasks that make the responses not yet complete, by their ids.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
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
