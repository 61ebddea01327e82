"""`Queues`: waiting and running requests in the order of their ranks; two sorted lists, whatever the policy.

A rank is: the elder before all, then the class (background, and what the policy says), the turn of the tenant, the
arrival. No two requests arrive at the same time, so the order is total, and a preempted request returns to its place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, overload

from tokenmill.core.request import Request
from tokenmill.engine.scheduler.fairness import Rounds
from tokenmill.engine.scheduler.policies import QueuePolicy, View
from tokenmill.engine.scheduler.seniority import Seniority

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


class Queues:
    """Both queues, and the ranks of all live requests.

    Attributes:
        num_changes: how often a queue, the order in one, or what its requests hold has changed.
        seniority: finds the elder, which comes before all others.
    """

    def __init__(self, policy: QueuePolicy, aging_steps: int) -> None:
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.num_changes = 0
        self.seniority = Seniority(aging_steps)
        self._policy = policy
        self._rounds = Rounds() if policy.by_tenant else None

    def queue_of(self, request: Request) -> RequestQueue:
        """Return the queue of a request; paused and finished requests are in none."""
        return self.running if request.is_running else self.waiting

    def enter(self, request: Request) -> None:
        """Queue a new request."""
        self._update([request] if self._rounds is None else self._rounds.join(request))
        self.waiting.add(request)

    def enter_again(self, request: Request) -> None:
        """Queue a session that goes on, as one that has just come."""
        request.rank = self._rank(request)
        self.waiting.add(request)

    def leave(self, request: Request) -> None:
        """Take a request that is gone from its tenant."""
        if self._rounds is not None:
            self._rounds.leave(request)

    def begin_step(self, step: int, view: View, alive: Mapping[str, Request]) -> None:
        """Update the ranks that change with time, and look for the elder."""
        changed = [request for request in self._policy.changed(view, step) if request.id in alive]
        for request in changed:
            request.rank = self._rank(request)
        if changed:
            self.num_changes += 1
            self.waiting.sort()
            self.running.sort()
        elder = self.seniority.chosen(step, alive.values())
        if elder is not None:
            self._update([elder])
            self.waiting.sort()

    def charge(self, requests: Iterable[Request], num_tokens: int) -> None:
        """Charge the tenants of a step's requests, so that others have their turns."""
        if self._rounds is not None and num_tokens:
            self._update(self._rounds.charge(requests, num_tokens))

    def _update(self, requests: list[Request]) -> None:
        """Update the ranks of these requests and restore the order of both queues."""
        self.num_changes += bool(requests)
        for request in requests:
            request.rank = self._rank(request)
        if len(requests) > 1 or (requests and requests[0].is_running):
            self.waiting.sort()
            self.running.sort()

    def _rank(self, request: Request) -> tuple[tuple[int, Any], int, int]:
        # There is one elder at most, so below 0 what the policy says is compared with nothing.
        precedence = -1 if request is self.seniority.elder else int(request.is_background)
        round = 0 if self._rounds is None else self._rounds.round_of(request)
        return (precedence, self._policy.rank(request)), round, request.arrival

    def check_invariants(self, alive: dict[str, Request]) -> None:
        """Raise AssertionError if a queue is out of order, or a rank out of date."""
        assert all(r.is_running for r in self.running), "a request in the running queue that does not run"
        assert not any(r.is_running or r.is_finished for r in self.waiting), "a waiting request that runs or ended"
        for queue in (self.waiting, self.running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(ranks), "a queue is out of order"
            assert all(request.rank == self._rank(request) for request in queue), "a rank is out of date"
        if self._rounds is not None:
            self._rounds.check_invariants(alive)
