"""Names for authors of schedulers, for `--scheduler-cls`. They stay; modules behind them may move.

A scheduler of its own kind derives from `SchedulerInterface` and does everything itself. One that only decides
otherwise derives from `SimpleScheduler`, or from `SchedulerBase`, whose `state` has all that our own scheduler works
with. `tokenmill.testing` says whether it holds what every scheduler must.
"""

from __future__ import annotations

from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import FinishReason, Request
from tokenmill.core.scheduling import Feature, InFlightStep, SchedulerInterface
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.base import SchedulerBase
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.plan_builder import PlanBuilder
from tokenmill.engine.scheduler.policies import most_tokens_held
from tokenmill.engine.scheduler.seniority import is_ready

__all__ = [
    "Feature",
    "FinishReason",
    "InFlightStep",
    "KVManager",
    "PlanBuilder",
    "PrefixMatch",
    "Request",
    "SchedulerBase",
    "SchedulerConfig",
    "SchedulerInterface",
    "SimpleScheduler",
    "StepPlan",
    "StepResult",
    "most_tokens_held",
]


class SimpleScheduler(SchedulerBase):
    """`SchedulerBase` with the moves of a scheduler that preempts no request: `candidates`, `begin` and `advance`.

    `schedule` of a subclass calls `begin_step`, fills the plan that it returns by these, and returns `launch(plan)`.
    """

    serves = SchedulerBase.serves | {Feature.GRAMMARS}

    def candidates(self) -> list[Request]:
        """Return the requests that can begin, in order: those that hold nothing and wait for their turn alone."""
        return [request for request in self.state.waiting if is_ready(request) and request.row is None]

    def match(self, plan: PlanBuilder, request: Request) -> PrefixMatch:
        """Find the cached prefix behind which a candidate can begin."""
        return self.state.match(request, plan.step)

    def num_left(self, request: Request) -> int:
        """Return how many tokens of a request are left to run; 0: it waits for a launched step."""
        left = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
        return 0 if request.will_reach_length or request.mask_missed else left

    def begin(self, plan: PlanBuilder, request: Request, match: PrefixMatch, most: int, hold: int) -> str:
        """Let a candidate run its first tokens behind its match, or return why it must wait.

        Args:
            most: tokens at most that it runs.
            hold: tokens that its pages must have room for from the start.
        """
        if not self.state.num_free_rows:
            return self.state.rows.shortage
        num_tokens, reason = plan.chunk(request, match.num_tokens, match)
        num_tokens = min(num_tokens, most)
        if not num_tokens:
            return reason or "the token budget of the step is used up"
        hold = max(hold, match.num_tokens + num_tokens)
        if reason := self.state.resources.acquire_all(request, match, hold, plan.step):
            return reason
        self.state.begin(request, match)
        plan.add_row(request)
        plan.schedule(request, num_tokens, 0, self.kv.pages(request))
        return ""

    def advance(self, plan: PlanBuilder, request: Request, most: int) -> str:
        """Let a running request run its next tokens, at most so many, or return why it cannot."""
        num_tokens, reason = plan.chunk(request, request.num_computed_tokens)
        num_tokens = min(num_tokens, most, self.num_left(request))
        if not num_tokens:
            return reason
        end = request.num_computed_tokens + num_tokens
        new_pages = self.state.pages.grow(request, end)
        if new_pages is None:
            return self.state.pages.reason_to_grow_later(request, end)
        plan.schedule(request, num_tokens, len(self.kv.pages(request)) - len(new_pages), new_pages)
        return ""
