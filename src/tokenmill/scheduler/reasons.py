"""What waiting requests wait for besides rows, pages and budget, counted."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.request import Request, RequestStatus

# What a request's status does not say is the same prompt.
WAIT_REASON_OF = {
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_ADAPTER: "adapter",
    RequestStatus.WAITING_FOR_REMOTE_KV: "remote_kv",
}
WAIT_REASONS = ("capacity", "same_prompt", "grammar")


def count_reasons(waiting: Iterable[Request]) -> dict[str, int]:
    """How many requests wait, by what for; see `Scheduler.waiting_by_reason`."""
    counts = dict.fromkeys(WAIT_REASONS, 0)
    for request in waiting:
        reason = WAIT_REASON_OF.get(request.status, "capacity")
        reason = reason if request.awaited_page is None else "same_prompt"
        counts[reason] = counts.get(reason, 0) + 1
    return counts
