"""Responses that can be asked for again: in memory, so many and so large at most, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `messages` is the chat up to its answer, without instructions."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Bounded in number and in bytes. One larger than all of it is not kept."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, in place of one of the same id."""
        response_id = stored.response["id"]
        self.drop(response_id)
        size = len(msgspec.json.encode(stored))
        if size > self._max_bytes:
            return
        self._stored[response_id] = stored, size
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response of this id, if it is still here."""
        if response_id not in self._stored:
            return None
        self._stored.move_to_end(response_id)
        return self._stored[response_id][0]

    def drop(self, response_id: str) -> bool:
        """Forget a response; False if it is not here."""
        entry = self._stored.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry[1]
        return entry is not None
