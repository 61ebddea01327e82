"""The order of requests: one key per policy, one sorted queue for all of them.

A request keeps its key for life, so a preempted one returns to exactly its old place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from tokenmill.request import Request

QueuePolicy = Callable[[Request], tuple[int, int]]


def fcfs(request: Request) -> tuple[int, int]:
    """First come, first served."""
    return (0, request.arrival)


def priority(request: Request) -> tuple[int, int]:
    """Lower priority number first, then arrival."""
    return (request.priority, request.arrival)


POLICIES: dict[str, QueuePolicy] = {"fcfs": fcfs, "priority": priority}


class RequestQueue:
    """Requests in policy order; `arrival` is unique, so the order is total. Used for waiting and for running ones."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=self._policy)

    def remove(self, request: Request) -> None:
        """Take a request out of its place."""
        index = bisect_left(self._requests, self._policy(request), key=self._policy)
        assert self._requests[index] is request, f"request {request.id} is not in this queue"
        del self._requests[index]

    def at(self, position: int) -> Request:
        """The request with `position` others before it."""
        return self._requests[position]

    def first(self) -> Request:
        """The request that is served next."""
        return self._requests[0]

    def last(self) -> Request:
        """The request that yields first: the victim of a preemption."""
        return self._requests[-1]

    def position(self, request: Request) -> int:
        """How many requests are served before this one."""
        return bisect_left(self._requests, self._policy(request), key=self._policy)
