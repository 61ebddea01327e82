"""`Pages`: the pages of requests, over the KV manager and the groups beside it, and those that a step leaves to others.

Where pages are counted, a list has a number for each group: the full group first, then those beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import PageGroup, Resource


class Pages(Resource):
    """Pages of running requests.

    Attributes:
        groups: groups of pages beside the full one.
        reserved: full pages that the step leaves to requests, by their ids. num_reserved: their sum, which must stay
            available.
    """

    def __init__(self, kv: KVManager, groups: Iterable[PageGroup] = ()) -> None:
        self.kv = kv
        self.groups = tuple(groups)
        self.reserved: dict[str, int] = {}
        self.num_reserved = 0

    # --- reservations of the step that is being scheduled -----------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Leave a request the pages that it lacks to hold `num_tokens` tokens."""
        self.unreserve(request)
        self.reserved[request.id] = num_pages = self.kv.num_missing_pages(request, num_tokens)
        self.num_reserved += num_pages

    def unreserve(self, request: Request) -> None:
        """Drop the reservation of a request, if it has one."""
        self.num_reserved -= self.reserved.pop(request.id, 0)

    def unreserve_all(self) -> None:
        """Drop all reservations."""
        self.reserved.clear()
        self.num_reserved = 0

    # --- what a request holds ---------------------------------------------------------------------------------------

    def check(self, request: Request, num_tokens: int) -> None:
        """Refuse a request that needs more pages than there are."""
        self.kv.check_size(num_tokens)

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Give a request its matched pages and new ones. Groups beside are asked first, and take theirs after."""
        num_pages = self.kv.num_pages_for(num_tokens)
        has_room = not self.groups or max(self._missing_beside(request, num_pages)) <= 0
        if has_room and self.kv.acquire(request, match, num_tokens, step, self.num_reserved):
            return ""
        return self._shortage(num_pages - len(match.pages), num_pages)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Give a request the pages that it lacks to hold `num_tokens` tokens.

        Returns:
            The new pages, or None if there are not enough of a group; nothing has changed then.
        """
        if self.kv.has_room(request, num_tokens):
            return []
        if self.groups and max(self._missing_beside(request, self.kv.num_pages_for(num_tokens))) > 0:
            return None
        new_pages = self.kv.allocate(request, num_tokens, self.num_reserved)
        if new_pages:
            self._resize(request)
        return new_pages

    def trim(self, request: Request, num_tokens: int) -> int:
        """Take back the pages behind a request's first `num_tokens` tokens, and return their number."""
        num_dropped = self.kv.trim(request, num_tokens)
        if num_dropped:
            self._resize(request)
        return num_dropped

    def _resize(self, request: Request) -> None:
        for group in self.groups:
            group.resize(request)

    def release(self, request: Request, step: int) -> None:
        """Take back all pages of a request."""
        self.kv.release(request, step)

    # --- what is short ----------------------------------------------------------------------------------------------

    def num_left(self) -> list[int]:
        """Return how many pages of each group can be taken now."""
        return [self.kv.num_available, *(group.num_left for group in self.groups)]

    def num_wanted(self, num_new: int, num_pages: int) -> list[int]:
        """Return what a request with `num_pages` pages, of which `num_new` are not matched, takes of each group."""
        return [num_new, *(group.num_wanted(num_pages) for group in self.groups)]

    def num_returned_by(self, requests: Iterable[Request], nodes: Iterable[RadixNode] = ()) -> list[int]:
        """Return how many pages of each group come back once requests release theirs and nodes are unlocked."""
        requests = list(requests)
        beside = [sum(map(group.num_held, requests)) for group in self.groups]
        return [self.kv.num_returned_by(requests, nodes), *beside]

    def num_missing(self, request: Request, num_tokens: int) -> list[int]:
        """Return how many pages of each group a request waits for, to hold `num_tokens` tokens; not above 0: none."""
        missing = self.kv.num_missing_pages(request, num_tokens) + self.num_reserved - self.kv.num_available
        return [missing, *self._missing_beside(request, self.kv.num_pages_for(num_tokens))]

    def _missing_beside(self, request: Request, num_pages: int) -> list[int]:
        wanted = [(group.num_wanted(num_pages) - group.num_held(request), group.num_left) for group in self.groups]
        return [more + self.num_reserved - left if more > 0 else 0 for more, left in wanted]

    def in_words(self, missing: Sequence[int]) -> str:
        """Say how many pages are missing, of the first group that lacks some."""
        names = ["", *(group.name + " " for group in self.groups)]
        return next(pages_text(count, name) for count, name in zip(missing, names, strict=True) if count > 0)

    def reason_to_grow_later(self, request: Request, num_tokens: int) -> str:
        """Return why a request that has pages must wait for more, to hold `num_tokens` tokens."""
        num_pages = self.kv.num_pages_for(num_tokens)
        return self._shortage(num_pages - len(self.kv.pages(request)), num_pages, "more ")

    def _shortage(self, num_new: int, num_pages: int, more: str = "") -> str:
        num_available = self.kv.num_available
        if self.groups and num_new + self.num_reserved <= num_available:
            return max(self.groups, key=lambda group: group.num_wanted(num_pages) - group.num_left).shortage(num_pages)
        needed = pages_text(num_new, more)
        return f"needs {needed}, {num_available} {'is' if num_available == 1 else 'are'} free or evictable"

    def counts(self) -> Mapping[str, Any]:
        """Return the pages of the full group, and how many prompt tokens were looked for and found."""
        return {
            "num_pages": self.kv.pool.num_usable * self.kv.keeps_kv,
            "num_pages_pinned": self.kv.num_pinned,
            "num_pages_evictable": self.kv.cache.num_evictable,
            "prefix_queries": self.kv.num_queried_tokens,
            "prefix_hits": self.kv.num_hit_tokens,
        }

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a page is lost, or a request has tokens without pages."""
        self.kv.check_invariants()
        for request in owners:
            assert self.kv.has_room(request, request.num_computed_tokens), "a token without a page"


def pages_text(count: int, more: str = "") -> str:
    """Return a number of pages in words."""
    return f"{count} {more}page{'' if count == 1 else 's'}"
