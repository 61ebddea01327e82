"""`SchedulePass`: fill one plan in one pass over the requests, in the order that a batch policy sets.

There is no prefill and no decode here: a request's computed tokens catch up with the tokens it has (vLLM V1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.core.request import Request, RequestStatus
from tokenmill.engine.scheduler.admission import Admission
from tokenmill.engine.scheduler.capacity import make_room
from tokenmill.engine.scheduler.config import Policies
from tokenmill.engine.scheduler.drafts import Drafts
from tokenmill.engine.scheduler.fairness import serving_order
from tokenmill.engine.scheduler.plan_builder import PlanBuilder
from tokenmill.engine.scheduler.state import SchedulerState

# Decodes of a step that take hardly longer than one: they wait for weights. Shared out, they would be read more often.
LEAST_SHARE = 16
# Requests that are passed over in a step because it has too few tokens left for them, where shorter ones may fill it.
MOST_PASSED_OVER = 16
_BUDGET_USED_UP = "the token budget of the step is used up"


class SchedulePass:
    """Fills the plan of one step, and records why each other request must wait.

    Attributes:
        builder: the plan in the making.
    """

    def __init__(self, builder: PlanBuilder, policies: Policies, state: SchedulerState) -> None:
        self.builder = builder
        self._config = builder.config
        self._state = state
        self._pages = state.pages
        self._queue_policy = policies.queue
        self._makes_promises = policies.admission.is_promise
        self._drafts = Drafts(state.drafters, state.pages)
        self._admission = Admission(builder.config, policies.admission, state, builder, self._drafts)
        self._has_admitted = False
        self._position = 0  # in the waiting queue: all before it are passed over
        self._is_closed = False  # the first one that is not cannot begin in this step
        self._turn: Any = None  # of the first request that was too long for the rest of the step
        self._num_passed_over = 0
        self._num_decodes_left = 0

    @property
    def is_empty(self) -> bool:
        """True while nothing is scheduled."""
        return not self.builder.requests

    @property
    def is_for_decodes(self) -> bool:
        """True in each second step while the oldest request, which comes before all others, decodes."""
        elder = self._state.queues.seniority.elder
        is_decoding = elder is not None and elder.is_running and not elder.is_prefilling
        return is_decoding and self.builder.step % 2 == 0

    def make_room(self) -> None:
        """Preempt requests of tenants that hold more, so that waiting ones of tenants that hold less can begin.

        Only where tenants take turns or a background request runs, and before anything is scheduled, so that no request
        in the step yields. What an admission policy has promised only background requests give back.
        """
        running = self._state.running
        takes_turns = self._queue_policy.by_tenant and not self._makes_promises
        if takes_turns or (running and running[-1].is_background):
            make_room(self._state, self._admission, takes_turns, self.builder.budget - len(running))

    def advance(self, which: Callable[[Request], bool] | None = None, lets_in: bool = True) -> bool:
        """Schedule running requests in order. Return True if none was short of pages: only then may others enter.

        Requests that `which` leaves out keep the pages of their next token reserved; else a prompt after them could
        take those pages again and again, be preempted, and no request would advance.

        Args:
            which: selects requests; None: all of them.
            lets_in: where tenants take turns, a waiting request enters before a running one that comes after it; before
                one in the background, always.
        """
        state, enough_pages = self._state, True
        lets_in = lets_in and bool(state.waiting)
        # Of a pipeline each step takes its share of the decodes, so that there are some for every stage.
        self._num_decodes_left = max(LEAST_SHARE, -(-len(state.running) // self._config.num_stages))
        by_tenant, budget = self._queue_policy.by_tenant, self._config.max_num_batched_tokens
        running, num_first = serving_order(state.running, state.queues.seniority.elder, by_tenant, budget)
        self._pages.unreserve_all()
        reserved = self._pages.reserved
        if which is not None:
            for request in running:
                if not which(request):
                    self._pages.reserve(request, request.num_computed_tokens + 1)
        for number, request in enumerate(running):
            if request.status is not RequestStatus.RUNNING or request.id in reserved:
                continue  # preempted by an earlier one in this very pass, or not meant
            if lets_in and enough_pages and number >= num_first and (by_tenant or request.is_background):
                self._admit_some(before=request)
            num_tokens, request.wait_reason = self._next_tokens(request)
            if num_tokens:
                enough_pages &= self._advance_one(request, num_tokens)
        return enough_pages

    def _next_tokens(self, request: Request) -> tuple[int, str]:
        """Return how many tokens of a running request the step runs, and why none if it is 0.

        Properties of `Request` are written out: each decode of each step comes this way.
        """
        if request.mask_missed or request.has_drafts:
            why = "its grammar mask was not ready in time" if request.mask_missed else "one verifies its draft tokens"
            return 0, f"waiting for in-flight steps: {why}"
        num_tokens = request.num_tokens + request.num_pending_tokens
        remaining = num_tokens - request.num_computed_tokens
        if remaining == 0 or num_tokens >= request.max_tokens_total:
            return 0, request.wait_reason  # its last token is being sampled by a launched step
        if request.num_pending_tokens and (
            self._config.num_stages > 1 or self._drafts.holds(request, len(self._state.running))
        ):
            return 0, "waiting for the in-flight step that samples its next token"
        if self.builder.budget == 0:
            return 0, _BUDGET_USED_UP
        if remaining == 1 and not self._num_decodes_left:
            return 0, "runs in the next step: each stage has a share of the requests"
        if remaining > 1 or self._state.resources.limit:
            count, reason = self.builder.chunk(request, request.num_computed_tokens)
        else:
            count, reason = 1, ""
        self._num_decodes_left -= remaining == count == 1
        return count, reason

    def _advance_one(self, request: Request, num_tokens: int) -> bool:
        """Schedule a running request; return True if there were pages for it without taking any from others."""
        end = request.num_computed_tokens + num_tokens
        if self._pages.kv.has_room(request, end):
            self.builder.schedule(request, num_tokens)
            return True
        enough_pages = True
        while (new_pages := self._pages.grow(request, end)) is None:
            if self._admission.drop_draft_pages() or self._pages.kv.give_copies(self._state.running):
                continue
            enough_pages = False
            missing = self._pages.num_missing(request, end)
            if self._state.will_return(missing):
                users = "saves" if self._state.num_saving_pages else "in-flight steps"
                request.wait_reason = f"waiting for {self._pages.in_words(missing)} that {users} still use"
                self._pages.reserve(request, end)
                return False
            if not self._state.preempt_idle():
                victim = self._choose_victim()
                self._state.preempt(victim)
                self._pages.unreserve(victim)
                self._position, self._is_closed = 0, False
                if victim is request:
                    return False
        first_page = len(self._pages.kv.pages(request)) - len(new_pages)
        self.builder.schedule(request, num_tokens, first_page, new_pages)
        return enough_pages

    def _choose_victim(self) -> Request:
        """Choose the request to preempt among those not in the step yet; the elder only if it is the last of them."""
        scheduled = {request.id for request in self.builder.requests}
        candidates = [request for request in self._state.running if request.id not in scheduled]
        if len(candidates) > 1 and candidates[0] is self._state.queues.seniority.elder:
            del candidates[0]
        return self._queue_policy.choose_victim(candidates)

    def admit(self, which: Callable[[Request], bool] | None = None, limit: int | None = None) -> None:
        """Admit waiting requests in order until the budget, the rows or the pages end; none overtakes the head.

        Requests that wait for something else are passed over and keep their place.

        Args:
            which: selects requests, the rest is passed over; None: all.
            limit: most requests to admit; None: as many as fit.
        """
        self._position, self._is_closed = 0, False
        self._admit_some(which, limit)

    def _admit_some(
        self,
        which: Callable[[Request], bool] | None = None,
        limit: int | None = None,
        before: Request | None = None,
    ) -> None:
        """Admit as `admit` does, but with `before` only requests that come before this one."""
        self._has_admitted = True
        waiting = self._state.waiting
        while not self._is_closed and self._position < len(waiting) and self.builder.budget > 0:
            request = waiting[self._position]
            if limit == 0 or (before is not None and request.rank > before.rank):
                return
            if self._admission.is_passed_over(request) or (which is not None and not which(request)):
                self._position += 1
                continue
            if self._turn is not None and request.rank[:2] != self._turn:
                self._is_closed = True
                return
            request.wait_reason = self._admission.admit(request)
            if request.awaited_page is not None or request.awaits_kv:
                continue  # it is passed over from now on
            if not request.wait_reason:
                limit = None if limit is None else limit - 1
            elif self._lets_shorter_ones_pass(request):
                self._position += 1
            elif not self._let_idle_yield(request):
                self._is_closed = True
        if not self._is_closed and self._position < len(waiting):
            waiting[self._position].wait_reason = _BUDGET_USED_UP

    def _lets_shorter_ones_pass(self, request: Request) -> bool:
        """Return True if a request that is whole in a step, and too long for the rest of this one, is passed over.

        Only requests of its turn fill the rest. What runs is done after a step, so that it opens the next one.
        """
        if self._state.kv.keeps_kv or request.num_tokens <= self.builder.budget or not self._state.num_free_rows:
            return False
        self._turn = request.rank[:2]
        self._num_passed_over += 1
        return self._num_passed_over <= MOST_PASSED_OVER

    def _let_idle_yield(self, request: Request) -> bool:
        """Let idle sessions yield, but only when no running request would make room by its end anyway.

        The request that wants to start yields last: it may hold pages of its own that the cache has too.
        """
        state = self._state
        if state.num_saving_pages:
            return False  # what has yielded before comes back when it is saved
        return not state.running and (state.preempt_idle(but=request) or state.preempt_idle())

    def add_drafts(self) -> None:
        """Let decodes run draft tokens with the rest of the budget, now that every request has got its own token."""
        self._drafts.add_to(self.builder)

    def explain_waiting(self) -> None:
        """Set the wait reason of the first waiting request if no admission was tried in this step."""
        if self._state.waiting and not self._has_admitted:
            self._state.waiting[0].wait_reason = "running requests come first, and one of them is short of pages"
