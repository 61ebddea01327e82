"""The scheduler: `schedule()` makes a plan, `commit()` takes in its outcome. After vLLM V1: no prefill, no decode.

Each step every request's `num_computed_tokens` catches up with the tokens it has, as far as the budget, the rows and
the pages go: running requests first, in policy order, then waiting ones. Several steps may be launched before the
first is committed (overlap), so an abort, a stop or a preemption only marks a request; its row and pages return at
the commit of the last launched step that uses them.

Knows no torch, no sockets and no clock. The same calls give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.kv.kv_manager import KVManager
from tokenmill.messages import TokenOutput
from tokenmill.request import FinishReason, Request, RequestStatus
from tokenmill.scheduler.plan import StepPlan, StepResult
from tokenmill.scheduler.plan_builder import PlanBuilder
from tokenmill.scheduler.queue import POLICIES, RequestQueue
from tokenmill.scheduler.row_pool import RowPool
from tokenmill.scheduler.seeds import request_seed


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step; see the flags of the same names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A plan whose outcome is not known yet, and the requests it pins."""

    plan: StepPlan
    requests: tuple[Request, ...]


class Scheduler:
    """All requests between their arrival and their last output."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.rows = RowPool(config.max_num_seqs)
        self.num_preemptions = 0
        self.step = 0
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(POLICIES[config.policy])
        self._running = RequestQueue(POLICIES[config.policy])
        self._launched: deque[LaunchedStep] = deque()

    @property
    def num_running(self) -> int:
        """Requests that own a row and make progress."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, pages or budget."""
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        """True while anything is unfinished or a launched step is not committed."""
        return bool(self._waiting or self._running or self._launched)

    def add(self, request: Request) -> None:
        """Take in a request; it waits for its turn."""
        assert request.id not in self._requests, f"request id {request.id} is in use"
        assert self.kv.num_pages_for(request.max_tokens_total) <= self.kv.pool.num_usable, "refused at the edge"
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests wherever they are. Unknown and finished ones are ignored: they may have just ended.

        Returns:
            The terminal output of each that was alive.
        """
        outputs = []
        for request_id in ids:
            request = self._requests.get(request_id)
            if request is None or request.is_finished:
                continue
            self._queue_of(request).remove(request)
            request.finish(FinishReason.ABORT)
            self._retire(request)
            outputs.append(TokenOutput(request.id, [], FinishReason.ABORT))
        return outputs

    # --- schedule -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if nothing can run before a launched step is committed or a request arrives."""
        builder = PlanBuilder(self.step + 1, self.config.max_num_batched_tokens)
        if self._schedule_running(builder):
            self._schedule_waiting(builder)
        if not builder.requests:
            return None
        self.step = builder.step
        plan = builder.build()
        self._launched.append(LaunchedStep(plan, tuple(builder.requests)))
        return plan

    def _schedule_running(self, builder: PlanBuilder) -> bool:
        """Advance running requests in order. Returns True if none was short of pages: only then may others enter."""
        enough_pages = True
        for request in list(self._running):
            if builder.budget == 0:
                request.wait_reason = "the token budget of the step is used up"
                continue
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an earlier one in this very pass
            if request.will_reach_length or request.num_uncomputed_tokens == 0:
                continue  # its last token is being sampled by a launched step
            num_tokens = self._chunk(request.num_uncomputed_tokens, builder.budget)
            end = request.num_computed_tokens + num_tokens
            first_page = len(self.kv.pages(request))
            while (new_pages := self.kv.allocate(request, end)) is None:
                enough_pages = False
                if self._pages_returning() >= self.kv.num_pages_for(end) - first_page - self.kv.num_available:
                    break  # launched steps still use them; preempting more would not be faster
                if self._preempt_last() is request:
                    break
            if new_pages is not None:
                builder.schedule(request, num_tokens, first_page, new_pages)
            elif request.status is RequestStatus.RUNNING:
                request.wait_reason = "waits for the pages of a preempted request"
        return enough_pages

    def _schedule_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in order until the budget, the rows or the pages end; none overtakes the head."""
        while self._waiting and builder.budget > 0:
            request = self._waiting.first()
            request.wait_reason = self._admit(request, builder)
            if request.wait_reason:
                break

    def _admit(self, request: Request, builder: PlanBuilder) -> str:
        """Give a waiting request a row, pages and its first chunk. Returns why it must wait, or ""."""
        if request.num_inflight_steps:
            return "was preempted; a launched step still uses its row"
        if not self.rows.num_free:
            return f"needs a row, all {self.rows.num_rows} are in use"
        match = self.kv.match(request, builder.step)
        remaining = request.num_tokens - match.num_tokens
        num_tokens = self._chunk(remaining, builder.budget)
        if num_tokens < remaining and not self.config.enable_chunked_prefill:
            return f"needs {remaining} tokens of a step's budget, {builder.budget} are left"
        if not self.kv.acquire(request, match, match.num_tokens + num_tokens, builder.step):
            needed = self.kv.num_pages_for(match.num_tokens + num_tokens) - len(match.pages)
            return f"needs {needed} pages, {self.kv.num_available} are free or evictable"
        self._waiting.remove(request)
        self._running.add(request)
        request.move_to(RequestStatus.RUNNING)
        request.row = self.rows.take()
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        builder.add_row(request, request_seed(request, self.config.seed))
        builder.schedule(request, num_tokens, 0, self.kv.pages(request))
        return ""

    def _chunk(self, remaining: int, budget: int) -> int:
        """Tokens of one request in this step."""
        threshold = self.config.long_prefill_token_threshold
        capped = min(remaining, threshold) if threshold and self.config.enable_chunked_prefill else remaining
        return min(capped, budget)

    def _preempt_last(self) -> Request:
        """Send the running request that yields first back to the queue, to be recomputed later."""
        victim = self._running.last()
        self._running.remove(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        victim.wait_reason = "was preempted: its pages were needed by a request before it"
        self.num_preemptions += 1
        self._waiting.add(victim)
        self._retire(victim)
        return victim

    def _pages_returning(self) -> int:
        """Pages of marked requests that return once the launched steps are committed."""
        marked = {r.id: r for step in self._launched for r in step.requests if r.status is not RequestStatus.RUNNING}
        return sum(len(self.kv.pages(request)) for request in marked.values())

    # --- commit ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in the outcome of the oldest launched step.

        Returns:
            What the step brought each request that was waiting for a token.
        """
        launched = self._launched.popleft()
        plan = launched.plan
        assert plan.step == result.step, f"committing step {result.step}, expected {plan.step}"
        ends = (plan.num_computed + plan.num_scheduled).tolist()
        token_ids = result.token_ids.tolist()
        outputs = []
        for index, request in enumerate(launched.requests):
            request.num_inflight_steps -= 1
            if not request.is_finished:
                self.kv.cache_full_pages(request, ends[index], plan.step)
                if token_ids[index] >= 0:
                    outputs.append(self._take_token(request, token_ids[index]))
                    if index in result.logprobs:
                        outputs[-1].logprobs = [result.logprobs[index]]
            if request.status is not RequestStatus.RUNNING:
                self._retire(request)
        return outputs

    def fail_launched(self, error: str) -> list[TokenOutput]:
        """End every request of the launched steps: one of those steps raised, and the later ones build on it.

        Their pages were never committed, so nothing that the failed steps wrote can be matched.

        Returns:
            The terminal output of each request that was alive.
        """
        outputs = []
        while self._launched:
            for request in self._launched.popleft().requests:
                request.num_inflight_steps -= 1
                if not request.is_finished:
                    self._queue_of(request).remove(request)
                    request.finish(FinishReason.ERROR)
                    outputs.append(TokenOutput(request.id, [], FinishReason.ERROR, error=error))
                self._retire(request)
        return outputs

    def _take_token(self, request: Request, token_id: int) -> TokenOutput:
        queue = self._queue_of(request)
        request.num_pending_tokens -= 1
        request.append_output(token_id)
        if request.is_finished:
            queue.remove(request)
        return TokenOutput(
            request.id, [token_id], request.finish_reason, request.stop_reason, request.num_cached_tokens
        )

    def _queue_of(self, request: Request) -> RequestQueue:
        return self._running if request.status is RequestStatus.RUNNING else self._waiting

    def _retire(self, request: Request) -> None:
        """Take row and pages back from a finished or preempted request, unless a launched step still uses them."""
        if request.num_inflight_steps:
            return
        if request.row is not None:
            self.rows.give_back(request.row)
            self.kv.release(request, self.step)
            request.row = None
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0
        if request.is_finished:
            del self._requests[request.id]

    # --- explain and check ----------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> str:
        """Why a request was not scheduled in the last step; "" if it was.

        Raises:
            KeyError: no such request is alive.
        """
        request = self._requests[request_id]
        if request.status is RequestStatus.RUNNING:
            return request.wait_reason
        ahead = self._waiting.position(request)
        if not ahead:
            return request.wait_reason or "has just arrived"
        return f"{ahead} ahead of it; the first {self._waiting.first().wait_reason or 'has just arrived'}"

    def check_invariants(self) -> None:
        """Every owner's books agree; raises AssertionError where they do not. For tests: O(everything)."""
        self.kv.check_invariants()
        launched = [request for step in self._launched for request in step.requests]
        pinned = {r.id: r for r in [*self._running, *launched]}
        rows = [request.row for request in pinned.values()]
        assert len(set(rows)) == len(rows) and None not in rows, "two requests own one row, or one owns none"
        assert len(rows) + self.rows.num_free == self.rows.num_rows, "a row is lost"
        for request in pinned.values():
            assert request.num_inflight_steps == sum(r is request for r in launched), "in-flight steps are off"
            held = len(self.kv.pages(request)) * self.kv.page_size
            assert request.num_computed_tokens <= held, "a token without a page"
            assert request.num_tokens + request.num_pending_tokens <= request.max_tokens_total, "past its length"
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), "a waiting request that runs"
        assert len(self._requests) == len({r.id for r in [*self._waiting, *pinned.values()]}), "a request is lost"
