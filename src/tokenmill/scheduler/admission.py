"""Which pages an admitted request takes at once: two policies, side by side."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.request import Request

AdmissionPolicy = Callable[[Request, int], int]


def optimistic(request: Request, end: int) -> int:
    """Only those of the tokens it runs now, up to `end`: more requests run, and some are preempted when pages end."""
    return end


def reserve(request: Request, end: int) -> int:
    """Those of its longest possible output: fewer requests run, and none that runs is ever preempted."""
    return request.max_tokens_total


ADMISSION_POLICIES: dict[str, AdmissionPolicy] = {"optimistic": optimistic, "reserve": reserve}
