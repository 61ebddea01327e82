"""Make room before a step is scheduled: requests of tenants that hold more yield to those of tenants that hold less.

So holdings become more equal with each preemption, no tenant takes back what was taken from it, and a tenant never
loses its only request; see `fairness.py`. A background request yields to any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.core.request import Request
from tokenmill.engine.scheduler.admission import Admission
from tokenmill.engine.scheduler.resources.pages import Pages
from tokenmill.engine.scheduler.state import SchedulerState


def make_room(state: SchedulerState, admission: Admission, takes_turns: bool, budget: int) -> None:
    """Preempt running requests so that waiting ones can begin, in order, as many as the budget lets begin.

    Args:
        takes_turns: False: only background requests yield, to those that are not.
    """
    num_changes, capacity = state.queues.num_changes, CapacityCheck(state)
    if num_changes == state.full_at:
        return
    for request in list(state.waiting):
        if admission.is_passed_over(request) or request.row is not None:
            continue
        if budget <= 0 and capacity.num_rows:
            return
        pages = state.kv.num_pages_for(admission.num_tokens_to_hold(request, min(request.num_tokens, max(1, budget))))
        matched = 0
        if not capacity.suffices(pages, pages):
            match = state.match(request, state.step + 1)
            if admission.awaits_page(request, match):
                continue
            matched = len(match.pages)
            if not capacity.suffices(pages - matched, pages):
                need = capacity.need(pages - matched, pages)
                victims = find_yielding(request, need, state.running, state.pages, takes_turns)
                for victim in victims:
                    state.preempt(victim)
                if not victims:
                    state.full_at = state.queues.num_changes
                    return
        capacity.add(pages - matched, pages)
        budget -= request.num_tokens


@dataclass(slots=True)
class Need:
    """Pages that a waiting request takes, and the rows, and pages of each group, that are missing for it."""

    pages: int
    missing_rows: int
    missing_pages: list[int]

    @property
    def lacks_pages(self) -> bool:
        """True if pages of a group are missing."""
        return max(self.missing_pages) > 0

    @property
    def is_met(self) -> bool:
        """True if nothing is missing."""
        return self.missing_rows <= 0 and not self.lacks_pages


class CapacityCheck:
    """Counts the rows and pages that earlier requests take, to see whether the next one fits beside them.

    Attributes:
        num_rows: rows of the counted requests.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.num_rows = 0
        self._num_pages = [0] * len(state.pages.num_left())

    def _missing(self, num_new: int, num_pages: int) -> list[int]:
        """Return the pages of each group that are not there for another request, besides what the counted ones take."""
        pages = self._state.pages
        columns = zip(self._num_pages, pages.num_wanted(num_new, num_pages), pages.num_left(), strict=True)
        return [taken + wanted - left for taken, wanted, left in columns]

    def suffices(self, num_new: int, num_pages: int) -> bool:
        """Return True if a request can take its row, and `num_pages` pages of which `num_new` are not matched, now."""
        return self.num_rows < self._state.num_free_rows and max(self._missing(num_new, num_pages)) <= 0

    def need(self, num_new: int, num_pages: int) -> Need:
        """Return the rows and pages that will be missing for another request once launched steps are committed."""
        state = self._state
        missing_rows = self.num_rows + 1 - state.num_free_rows - state.num_returning_rows()
        columns = zip(self._missing(num_new, num_pages), state.num_returning_pages(), strict=True)
        return Need(num_new, missing_rows, [missing - returning for missing, returning in columns])

    def add(self, num_new: int, num_pages: int) -> None:
        """Count another request's row and pages."""
        self.num_rows += 1
        wanted = self._state.pages.num_wanted(num_new, num_pages)
        self._num_pages = [taken + more for taken, more in zip(self._num_pages, wanted, strict=True)]


@dataclass(slots=True)
class Share:
    """Rows and pages that a tenant's running requests hold."""

    rows: int = 0
    pages: int = 0


def find_yielding(
    waiting: Request, need: Need, running: Iterable[Request], pages: Pages, takes_turns: bool = True
) -> list[Request]:
    """Choose running requests to preempt so that `waiting` can begin: the last in order, and no more than needed.

    Args:
        takes_turns: False: only background requests yield, to those that are not.

    Returns:
        The requests to preempt; empty if those that would yield do not hold enough.
    """
    running, shares = list(running), dict[str, Share]()
    for request in running:
        share = shares.setdefault(request.tenant, Share())
        share.rows += 1
        share.pages += len(pages.kv.pages(request))
    own = shares.get(waiting.tenant, Share())
    yielding: list[Request] = []
    for request in reversed(running):
        is_lower = request.is_background and not waiting.is_background
        if need.is_met or request.rank < waiting.rank or not (takes_turns or is_lower):
            break
        share = shares[request.tenant]
        num_pages = len(pages.kv.pages(request))
        gives_row = need.missing_rows > 0 and (is_lower or share.rows - 1 >= own.rows + 1)
        gives_pages = need.lacks_pages and (is_lower or share.pages - num_pages >= own.pages + need.pages)
        is_other = is_lower or request.tenant != waiting.tenant
        if is_other and (gives_row or (gives_pages and need.missing_rows <= 0)):
            yielding.append(request)
            share.rows -= 1
            share.pages -= num_pages
            need.missing_rows -= 1
            returned = pages.num_returned_by([request])
            need.missing_pages = [lack - back for lack, back in zip(need.missing_pages, returned, strict=True)]
    return yielding if need.is_met else []
