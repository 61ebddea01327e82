"""`RequestQueue`: requests in the order of their ranks; one sorted list, whatever the policy.

No two requests arrive at the same time, so the order is total, and a preempted request returns to its place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import overload

from tokenmill.core.request import Request

_rank = attrgetter("rank")


class RequestQueue(Sequence[Request]):
    """Waiting or running requests in order of rank. Call `sort` after ranks change, before any other call."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request at its place."""
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Remove a request from the queue."""
        index = bisect_left(self._requests, request.rank, key=_rank)
        assert self._requests[index] is request, f"request {request.id} is not in this queue"
        del self._requests[index]

    def sort(self) -> None:
        """Restore the order after ranks have changed."""
        self._requests.sort(key=_rank)

    @overload
    def __getitem__(self, position: int) -> Request: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[Request]: ...

    def __getitem__(self, position: int | slice) -> Request | Sequence[Request]:
        return self._requests[position]

    def position(self, request: Request) -> int:
        """Return the number of requests served before this one."""
        return bisect_left(self._requests, request.rank, key=_rank)
