"""Times of requests, for viewers that come when the iterations in which these lie are forgotten.

Costs per request, none per token: an iteration without news, new rows or first tokens changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import msgspec

from tokenmill.core.live import LiveSpan
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepPlan
from tokenmill.engine.loop.step_log import News

# More than leave their rows in a thousand iterations, but for the shortest requests.
SPANS_KEPT = 4096
_NEVER = 0.0


class Lifetime(msgspec.Struct):
    """The times of a live request by the engine's clock, 0: not yet; `row` is the one that it took last.

    Attributes:
        deadline: when its client gives it up; 0: its client has not said.
    """

    num_prompt_tokens: int
    arrived_at: float
    row: int = -1
    row_at: float = _NEVER
    first_at: float = _NEVER
    deadline: float = _NEVER


_UNKNOWN = Lifetime(0, _NEVER)


class Lifetimes:
    """Keeps when live requests arrived, took their rows and got their first tokens, and who had rows before."""

    def __init__(self) -> None:
        self._live: dict[str, Lifetime] = {}
        self._unstarted: dict[str, float] = {}  # live requests without a token, and their deadlines
        self._left: deque[tuple[float, LiveSpan]] = deque(maxlen=SPANS_KEPT)

    def expect(self, request_id: str, deadline: float) -> None:
        """Expect the first token of a request, which may come before its first iteration has ended."""
        self._unstarted[request_id] = deadline

    def started(self, outputs: Sequence[TokenOutput]) -> list[str]:
        """Return the requests whose first tokens are among `outputs`."""
        if not self._unstarted:
            return []
        return [output.id for output in outputs if output.token_ids and output.id in self._unstarted]

    def add(self, plan: StepPlan | None, news: News, ended_at: float) -> None:
        """Take in an iteration, which began at `news.at` and ended at `ended_at`."""
        for request_id, count in news.arrived:
            self._live[request_id] = Lifetime(count, news.at, deadline=self._unstarted.get(request_id, _NEVER))
        for request_id in news.preempted:
            self._leave(request_id, news.at)
        for new in () if plan is None else plan.new_rows:
            self._leave(new.request_id, news.at)
            lifetime = self._live.setdefault(new.request_id, Lifetime(new.num_prompt_tokens, _NEVER))
            lifetime.row, lifetime.row_at = new.row, news.at
        for request_id in news.first:
            self._live.setdefault(request_id, Lifetime(0, _NEVER)).first_at = ended_at
            self._unstarted.pop(request_id, None)
        for request_id, _ in news.ended:
            self._leave(request_id, ended_at)
            self._live.pop(request_id, None)
            self._unstarted.pop(request_id, None)

    def _leave(self, request_id: str, at: float) -> None:
        """Note that a request has left the row that it may have."""
        lifetime = self._live.get(request_id)
        if lifetime is not None and lifetime.row_at:
            self._left.append((at, _span(request_id, lifetime)))
            lifetime.row_at = _NEVER

    def of(self, request_id: str) -> Lifetime:
        """Return the times of a live request; all are 0 if it is none."""
        return self._live.get(request_id, _UNKNOWN)

    def owners(self, at: float) -> list[LiveSpan]:
        """Return who had the rows just before `at`, as far as is known."""
        left = (span for until, span in self._left if until >= at)
        live = (_span(request_id, lifetime) for request_id, lifetime in self._live.items() if lifetime.row_at)
        return [span for span in chain(left, live) if span.since < at]


def _span(request_id: str, lifetime: Lifetime) -> LiveSpan:
    return LiveSpan(
        request_id,
        lifetime.row,
        lifetime.row_at,
        lifetime.num_prompt_tokens,
        lifetime.arrived_at,
        lifetime.first_at,
    )
