"""Fairness between tenants: they take turns, and a tenant that holds more yields rows and pages to one that holds less.

Turns are given in rounds, by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). What tenants share is steps:
of each step a tenant is served as large a part as it has of the step's tokens. Its turn lasts until it has been served
two steps' worth. The tenant with fewer turns goes first; in the same round it is by arrival, so calls shorter than a
turn are served as they come.

A clock says how much each tenant would have got had all been served alike (the virtual time of fair queueing: Demers,
Keshav and Shenker, SIGCOMM 1989). A new tenant takes part in the round that the clock shows: being away earns nothing.
What a request runs again after a preemption is not counted twice. Background requests have a clock and rounds of their
own.

Where all rows or pages are in use, a tenant that holds more yields to one that holds less, as long as it keeps no less
than the other then has. So holdings become more equal with each preemption, no tenant takes back what was taken from
it, and a tenant never loses its only request. A background request yields to any other, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.core.request import Request

# Steps that a turn lasts for: a request that has just come waits for two at most.
QUANTUM = 2


@dataclass(slots=True)
class Tenant:
    """A tenant's turns and live requests.

    Attributes:
        served: steps, by the clock.
        round: number of the round it takes part in: the turns that it has used up.
        requests: its live requests, by id.
    """

    served: float
    round: int
    requests: dict[str, Request] = field(default_factory=dict)


class Rounds:
    """Counts the turns that each tenant has had."""

    def __init__(self) -> None:
        self._tenants: tuple[dict[str, Tenant], dict[str, Tenant]] = {}, {}  # the second ones in the background
        self._clocks = [0.0, 0.0]

    def round_of(self, request: Request) -> int:
        """Return the round that the request's tenant takes part in: the number of turns it has used up."""
        return self._tenants[request.is_background][request.tenant].round

    def join(self, request: Request) -> list[Request]:
        """Add a new request to its tenant.

        Returns:
            All requests of its tenant if they have moved to another round, else this one alone.
        """
        round = int(self._clocks[request.is_background] // QUANTUM)
        tenants = self._tenants[request.is_background]
        tenant = tenants.setdefault(request.tenant, Tenant(round * QUANTUM, round))
        tenant.requests[request.id] = request
        if tenant.round >= round:
            return [request]
        tenant.served, tenant.round = round * QUANTUM, round
        return list(tenant.requests.values())

    def leave(self, request: Request) -> None:
        """Remove a request, and with its last request the tenant."""
        tenants = self._tenants[request.is_background]
        tenant = tenants[request.tenant]
        del tenant.requests[request.id]
        if not tenant.requests:
            del tenants[request.tenant]

    def charge(self, scheduled: Iterable[Request], num_tokens: int) -> list[Request]:
        """Charge tenants for a step of `num_tokens`: each request's new tokens up to its `num_computed_tokens`.

        Returns:
            The requests of the tenants that enter another round.
        """
        part, totals, advanced = 1 / num_tokens, [0, 0], []
        for request in scheduled:
            new = request.num_computed_tokens - request.num_charged_tokens
            if new > 0:
                request.num_charged_tokens += new
                totals[request.is_background] += new
                tenant = self._tenants[request.is_background][request.tenant]
                tenant.served += new * part
                if tenant.served >= (tenant.round + 1) * QUANTUM:
                    tenant.round += 1
                    advanced.append(tenant)
        for number, (total, tenants) in enumerate(zip(totals, self._tenants, strict=True)):
            if total:
                self._clocks[number] += total * part / len(tenants)
        return [request for tenant in advanced for request in tenant.requests.values()]

    def check_invariants(self, alive: dict[str, Request]) -> None:
        """Raise AssertionError unless every live request has its tenant, and every tenant a request."""
        tenants = [tenant for some in self._tenants for tenant in some.values()]
        known = {request_id for tenant in tenants for request_id in tenant.requests}
        assert known == set(alive), "a tenant has lost a request or keeps one that ended"
        assert all(tenant.requests for tenant in tenants), "a tenant outlives its requests"


def serving_order(
    queue: Sequence[Request], elder: Request | None, takes_turns: bool, budget: int
) -> tuple[list[Request], int]:
    """Return the running requests in the order in which a step serves them, and how many decodes precede all prompts.

    Where tenants take turns and decodes leave half of a step to prompts, decodes come first: one token of each takes
    little from the others, and texts go on evenly while prompts take turns. So they do before an elder's prompt.

    Args:
        queue: the running requests by rank. elder: see `Seniority`.
        budget: tokens of a step.
    """
    running = list(queue)
    elder_prefills = elder is not None and elder.is_running and elder.is_prefilling
    if 2 * len(running) > budget or not (takes_turns or elder_prefills):
        return running, 0
    num_prompts = sum([request.is_prefilling for request in running])
    if elder_prefills:
        running.sort(key=lambda request: request.is_prefilling)
    elif num_prompts:
        running.sort(key=lambda request: (request.rank[0], request.is_prefilling))
    is_one_class = bool(running) and running[0].rank[0] == running[-1].rank[0]
    return running, len(running) - num_prompts if elder_prefills or is_one_class else 0
