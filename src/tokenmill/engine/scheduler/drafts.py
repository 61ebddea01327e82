"""`Drafts`: let decodes of a step run draft tokens besides their own with what the step has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.plan_builder import PlanBuilder
from tokenmill.engine.scheduler.resources.pages import Pages


class Drafts:
    """The drafts of a step, and the pages that rejected ones have left.

    Args:
        drafters: none, or one.
    """

    def __init__(self, drafters: Sequence[Drafter], pages: Pages) -> None:
        self._drafters = drafters
        self._pages = pages

    def holds(self, request: Request, num_running: int) -> bool:
        """Return True if a request should wait for the token that a launched step samples; see `Drafter.holds`."""
        return any(drafter.holds(request, num_running) for drafter in self._drafters)

    def add_to(self, builder: PlanBuilder) -> None:
        """Let decodes run drafts, now that every request has got its own token.

        No request is preempted for a draft: drafts without room in a page are dropped. A request that a launched step
        still samples for gets none, since what follows is not known yet.
        """
        for drafter in self._drafters:
            decodes = [
                (index, request, min(builder.budget, request.max_tokens_total - request.num_tokens - 1))
                for index, request in enumerate(builder.requests)
                if request.num_inflight_steps == 1 and request.num_computed_tokens == request.num_tokens
            ]
            decodes = [decode for decode in decodes if decode[2] > 0]
            if decodes:
                _, requests, limits = zip(*decodes, strict=True)
                proposed = drafter.propose(requests, limits, builder.num_tokens)
                for (index, request, limit), draft_ids in zip(decodes, proposed, strict=True):
                    self._add(index, request, draft_ids[: min(limit, builder.budget)], builder)

    def _add(self, index: int, request: Request, draft_ids: TokenArray, builder: PlanBuilder) -> None:
        if not len(draft_ids):
            return
        kv = self._pages.kv
        first_page = len(kv.pages(request))
        new_pages = self._pages.grow(request, request.num_tokens + len(draft_ids))
        if new_pages is None:
            draft_ids = draft_ids[: first_page * kv.page_size - request.num_tokens]
        if len(draft_ids):
            builder.add_drafts(index, draft_ids, first_page, new_pages or [])

    def drop_pages(self, running: Iterable[Request], num_tokens_to_hold: Callable[[Request, int], int]) -> bool:
        """Take back pages that rejected drafts have left to running requests. Return False if there are none.

        Leaves requests alone whose launched steps may still write behind the computed tokens.

        Args:
            num_tokens_to_hold: tokens whose pages a request keeps that has computed so many.
        """
        if not self._drafters:
            return False
        num_dropped = 0
        for request in running:
            if not (request.has_drafts or request.mask_missed):
                end = max(request.num_computed_tokens, request.num_tokens)
                num_dropped += self._pages.trim(request, num_tokens_to_hold(request, end))
        return num_dropped > 0
