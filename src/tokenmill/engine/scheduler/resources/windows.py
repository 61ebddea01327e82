"""`Windows`: the pages of layers that attend to a window, as a group beside the full pages.

`WindowPages` keeps the books; this is the way of a request through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.core.plan import PageEntries, StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import CachedPages, KVManager
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.kv.window_pages import WindowPages
from tokenmill.engine.scheduler.resources.resource import PageGroup


class Windows(PageGroup):
    """Window pages of requests: promised when a request begins or grows, taken when a step needs them.

    Attributes:
        pages: their books.
    """

    name = "window"

    def __init__(self, kv: KVManager, pages: WindowPages) -> None:
        self.pages = pages
        self._kv = kv
        self._entries: list[tuple[int, int, int]] = []
        kv.on_cached.append(self._cached)
        kv.on_evicted.append(pages.forget_pages)

    @property
    def num_left(self) -> int:
        """Number of pages that can still be promised."""
        return self.pages.num_left

    def num_wanted(self, num_pages: int) -> int:
        """Return the pages to promise a request with `num_pages` full pages."""
        return self.pages.num_wanted(num_pages)

    def num_held(self, request: Request) -> int:
        """Return the number of pages promised to a request."""
        return self.pages.promised_to(request.id)

    def resize(self, request: Request) -> None:
        """Promise a request as many pages as its full pages say."""
        self.pages.promise(request.id, len(self._kv.pages(request)))

    def shortage(self, num_pages: int) -> str:
        """Return how many pages would have to be promised, and how many can be."""
        needed, left = self.pages.num_wanted(num_pages), self.pages.num_left
        return f"needs {needed} window pages, {left} of {self.pages.pool.num_usable} are unreserved"

    def check(self, request: Request, num_tokens: int) -> None:
        """Refuse a request that can never be promised enough."""
        self.pages.check_size(self._kv.num_pages_for(num_tokens))

    def shorten(self, request: Request, match: PrefixMatch, step: int) -> PrefixMatch:
        """Return the longest part of a match that is a hit in this group too."""
        num_tokens = self.pages.reach(match.pages) * self._kv.page_size
        return match if num_tokens == match.num_tokens else self._kv.match(request, step, num_tokens)

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Open a request's table with the matched pages that it still reaches; `Pages` has asked for the promise."""
        self.pages.open(request.id, match.pages, len(self._kv.pages(request)))
        return ""

    def schedule(self, request: Request, start: int, num_tokens: int, step: int) -> None:
        """Take the pages that the tokens need and were promised."""
        first_page, pages = self.pages.cover(request.id, start + num_tokens)
        if pages:
            row = request.row
            assert row is not None, "a request that runs has a row"
            self._entries += [(row, number, page) for number, page in enumerate(pages, first_page)]

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the new entries of the window table."""
        if not self._entries:
            return {}
        entries, self._entries = self._entries, []
        return {"window_pages": PageEntries(*np.array(entries, dtype=np.int32).T.copy())}

    def committed(self, request: Request, end: int) -> None:
        """Release the pages behind a request's window.

        The launched steps begin behind `end`, and so does what follows, unless it begins where a turn has ended or a
        token is sampled again.
        """
        if request.row is not None:
            num_computed = min(end, request.num_computed_tokens)
            self.pages.keep(request.id, num_computed, not request.num_inflight_steps)

    def _cached(self, cached: CachedPages) -> None:
        """Put a request's pages beside those of the tree; where that has a hole, pages beside duplicates too."""
        self.pages.offer(cached.request.id, cached.first, cached.pages.tolist())

    def release(self, request: Request, step: int) -> None:
        """Close a request's table."""
        self.pages.close(request.id)

    def counts(self) -> Mapping[str, Any]:
        """Return the pages of the group, those in tables, and those that only the tree holds."""
        return {
            "num_window_pages": self.pages.pool.num_usable,
            "num_window_pages_pinned": self.pages.num_pinned,
            "num_window_pages_evictable": self.pages.num_evictable,
        }

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a page is lost, or one is gone that a launched or further step reads."""
        ends = {}
        for request in owners:
            launched = [plan for plan in plans if request.id in plan.request_ids]
            begins = [int(plan.num_computed[plan.request_ids.index(request.id)]) for plan in launched]
            ends[request.id] = min([request.num_computed_tokens, *begins]), len(self._kv.pages(request))
        self.pages.check_invariants(ends)
