"""`Seniority`: put the oldest request before all others at last, whatever the policy.

A policy may prefer later requests for as long as they come: those of a better priority, of new tenants, all that are
not in the background. So every `aging_steps` steps the oldest request is looked for. If it was the oldest at the last
look too, it is the elder: it comes first until it ends, and waits for no other that computes the same prompt. So a
request ends after as many turns of an elder as there were requests before it, whatever comes later.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.request import Request, RequestStatus

_READY = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class Seniority:
    """Finds the elder by counting steps, without a clock: the same calls give the same choices.

    Attributes:
        elder: the request that comes before all others; None: absent.
    """

    def __init__(self, aging_steps: int) -> None:
        self.elder: Request | None = None
        self._aging_steps = aging_steps
        self._oldest: Request | None = None  # at the last look
        self._next_look = aging_steps

    def chosen(self, step: int, requests: Iterable[Request]) -> Request | None:
        """Look for a new elder before a step is scheduled.

        Args:
            requests: all live requests, in order of arrival.

        Returns:
            The request that has become the elder, or None.
        """
        if self.elder is not None:
            if not (self.elder.is_finished or self.elder.is_paused):
                return None
            self.forget_request(self.elder, step)
        if step < self._next_look:
            return None
        self._next_look = step + self._aging_steps
        oldest = next((request for request in requests if request.is_running or is_ready(request)), None)
        if oldest is not None and oldest is self._oldest:
            self.elder = oldest
        self._oldest = oldest
        return self.elder

    def forget_request(self, request: Request, step: int) -> None:
        """Count a request that ends, or begins another turn, as one that has just come."""
        if self._oldest is request:
            self._oldest = None
        if self.elder is request:
            self.elder, self._next_look = None, step + self._aging_steps


def is_ready(request: Request) -> bool:
    """Return False while a waiting request waits for something besides its turn: a grammar, remote KV."""
    return request.status in _READY
