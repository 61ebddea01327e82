"""`StepPass`: one pass over the books that fills one plan. Policies (`batch_policy`) say in which order.

There is no prefill and no decode here: a request's computed tokens catch up with the tokens it has (vLLM V1).
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.request import Request
from tokenmill.scheduler.admission import ADMISSION_POLICIES
from tokenmill.scheduler.books import Books, is_ready
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.plan_builder import PlanBuilder
from tokenmill.scheduler.seeds import request_seed


class StepPass:
    """Decides for one step; records at each request that must wait, why."""

    def __init__(self, config: SchedulerConfig, books: Books) -> None:
        self.builder = PlanBuilder(books.step + 1, config.max_num_batched_tokens)
        self._config = config
        self._books = books
        self._kv = books.kv
        self._claimed_pages: int  # since the last `advance`, which comes before any `admit`
        self._has_admitted = False
        self._tokens_to_hold = ADMISSION_POLICIES[config.admission]

    @property
    def is_empty(self) -> bool:
        """True while nothing is scheduled."""
        return not self.builder.requests

    def advance(self, which: Callable[[Request], bool]) -> bool:
        """Schedule running requests in order. Returns True if none was short of pages: only then may others enter.

        Those not meant by `which` keep a claim on the pages of their next token; otherwise a prompt after them could
        take those pages again and again, be preempted, and nobody would get on.
        """
        enough_pages = True
        self._claimed_pages = 0
        for request in list(self._books.running):
            if not request.is_running:
                continue  # preempted by an earlier one in this very pass
            if not which(request):
                self._claimed_pages += self._kv.num_missing_pages(request, request.num_computed_tokens + 1)
                continue
            if request.is_late:
                request.wait_reason = "waits for launched steps: the mask of its grammar was late"
                continue
            if request.will_reach_length or request.num_uncomputed_tokens == 0:
                continue  # its last token is being sampled by a launched step
            if self.builder.budget == 0:
                request.wait_reason = "the token budget of the step is used up"
                continue
            enough_pages &= self._advance_one(request)
        return enough_pages

    def admit(self) -> None:
        """Admit waiting requests in order until the budget, the rows or the pages end; none overtakes the head.

        Those that wait for something else are passed over and keep their place.
        """
        self._has_admitted = True
        position = 0
        waiting = self._books.waiting
        while position < len(waiting) and self.builder.budget > 0:
            request = waiting.at(position)
            if self._is_passed_over(request):
                position += 1
                continue
            request.wait_reason = self._resume(request) if request.row is not None else self._admit(request)
            if request.wait_reason and not self._make_room(request):
                return
        if position < len(waiting):
            waiting.at(position).wait_reason = "the token budget of the step is used up"

    def _make_room(self, request: Request) -> bool:
        """Let idle sessions yield, but only when nobody runs whose end would make room anyway.

        Last of all the one that wants to start: it may hold pages of its own that the cache has too.
        """
        books = self._books
        return not books.running and (books.preempt_idle(but=request) or books.preempt_idle())

    def explain_waiting(self) -> None:
        """Give the first of the waiting requests its reason where nobody came to ask for it."""
        if not self._books.waiting or self._has_admitted:
            return
        self._books.waiting.first().wait_reason = "running requests come first, and one of them is short of pages"

    def _advance_one(self, request: Request) -> bool:
        num_tokens = self._chunk(request.num_uncomputed_tokens)
        end = request.num_computed_tokens + num_tokens
        first_page = len(self._kv.pages(request))
        enough_pages = True
        while (new_pages := self._kv.allocate(request, end, self._claimed_pages)) is None:
            enough_pages = False
            missing = self._kv.num_missing_pages(request, end) + self._claimed_pages - self._kv.num_available
            if self._books.num_returning_pages() >= missing:
                request.wait_reason = f"waits for {_pages(missing)} that launched steps still use"
                self._claimed_pages += self._kv.num_missing_pages(request, end)
                return False
            if not self._books.preempt_idle() and self._books.preempt_last() is request:
                return False
        self.builder.schedule(request, num_tokens, first_page, new_pages)
        return enough_pages

    def _is_passed_over(self, request: Request) -> bool:
        if not is_ready(request):
            request.wait_reason = f"is {request.status.value.replace('_', ' ')}"
        elif self._books.awaits_group(request):
            request.wait_reason = "waits for the first of its group to compute the prompt they share"
        else:
            return False
        return True

    def _admit(self, request: Request) -> str:
        """Give a waiting request a row, pages and its first chunk. Returns why it must wait, or ""."""
        rows = self._books.rows
        if not rows.num_free:
            return f"needs a row, all {rows.num_rows} are in use"
        match = self._kv.match(request, self.builder.step)
        remaining = request.num_tokens - match.num_tokens
        num_tokens = self._chunk(remaining)
        if num_tokens < remaining and not self._config.enable_chunked_prefill:
            return f"needs {remaining} tokens of a step's budget, {self.builder.budget} are left"
        hold = self._tokens_to_hold(request, match.num_tokens + num_tokens)
        if not self._kv.acquire(request, match, hold, self.builder.step, self._claimed_pages):
            needed = self._kv.num_pages_for(hold) - len(match.pages)
            return self._short_of(_pages(needed))
        self._books.start(request)
        request.num_computed_tokens = match.num_tokens
        if not request.num_preemptions:
            # What it finds again of its own after a preemption is no gift of the cache.
            request.num_cached_tokens = min(match.num_tokens, request.num_prompt_tokens)
        self._launch_row(request, num_tokens, 0, self._kv.pages(request))
        return ""

    def _resume(self, request: Request) -> str:
        """Let one that kept its row go on: a session with new input, or one that a launched step still pins."""
        if request.num_inflight_steps:
            return "waits for a launched step that still uses its row"
        remaining = request.num_uncomputed_tokens
        num_tokens = self._chunk(remaining)
        if num_tokens < remaining and not self._config.enable_chunked_prefill:
            return f"needs {remaining} tokens of a step's budget, {self.builder.budget} are left"
        hold = self._tokens_to_hold(request, request.num_computed_tokens + num_tokens)
        first_page = len(self._kv.pages(request))
        new_pages = self._kv.allocate(request, hold, self._claimed_pages)
        if new_pages is None:
            needed = self._kv.num_pages_for(hold) - first_page
            return self._short_of(_pages(needed, "more "))
        self._books.start(request)
        self._launch_row(request, num_tokens, first_page, new_pages)
        return ""

    def _short_of(self, needed: str) -> str:
        verb = "is" if self._kv.num_available == 1 else "are"
        return f"needs {needed}, {self._kv.num_available} {verb} free or evictable"

    def _launch_row(self, request: Request, num_tokens: int, first_page: int, new_pages: list[int]) -> None:
        self.builder.add_row(request, request_seed(request, self._config.seed))
        self.builder.schedule(request, num_tokens, first_page, new_pages)

    def _chunk(self, remaining: int) -> int:
        """Tokens of one request in this step."""
        threshold = self._config.long_prefill_token_threshold
        capped = min(remaining, threshold) if threshold and self._config.enable_chunked_prefill else remaining
        return min(capped, self.builder.budget)


def _pages(count: int, more: str = "") -> str:
    return f"{count} {more}page{'' if count == 1 else 's'}"
