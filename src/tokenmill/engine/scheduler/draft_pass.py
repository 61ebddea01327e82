"""Add draft tokens to a step: decodes may run them besides their own tokens."""

from __future__ import annotations

from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.plan_builder import PlanBuilder


def add_drafts(drafter: Drafter, builder: PlanBuilder, kv: KVManager, spare: int) -> None:
    """Let decodes of a step run draft tokens with what it has left.

    No request is preempted for a draft: drafts without room in a page are dropped. A request that a launched step still
    samples for gets none, since what follows is not known yet.

    Args:
        spare: pages that must stay available for others.
    """
    decodes = [
        (index, request, min(builder.budget, request.max_tokens_total - request.num_tokens - 1))
        for index, request in enumerate(builder.requests)
        if request.num_inflight_steps == 1 and request.num_computed_tokens == request.num_tokens
    ]
    decodes = [decode for decode in decodes if decode[2] > 0]
    if not decodes:
        return
    _, requests, limits = zip(*decodes, strict=True)
    proposed = drafter.propose(requests, limits, builder.num_tokens)
    for (index, request, limit), draft_ids in zip(decodes, proposed, strict=True):
        _add(index, request, draft_ids[: min(limit, builder.budget)], builder, kv, spare)


def _add(index: int, request: Request, draft_ids: TokenArray, builder: PlanBuilder, kv: KVManager, spare: int) -> None:
    if not len(draft_ids):
        return
    first_page = len(kv.pages(request))
    new_pages = kv.allocate(request, request.num_tokens + len(draft_ids), spare)
    if new_pages is None:
        draft_ids = draft_ids[: first_page * kv.page_size - request.num_tokens]
    if len(draft_ids):
        builder.add_drafts(index, draft_ids, first_page, new_pages or [])
        if kv.windows is not None:
            builder.enter_windows(request, kv.windows)
