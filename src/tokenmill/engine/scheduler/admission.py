"""`Admission`: give one waiting request all that it needs to run, or say why it must wait."""

from __future__ import annotations

from tokenmill.core.request import Request
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.drafts import Drafts
from tokenmill.engine.scheduler.plan_builder import PlanBuilder
from tokenmill.engine.scheduler.policies import AdmissionPolicy
from tokenmill.engine.scheduler.seniority import is_ready
from tokenmill.engine.scheduler.state import SchedulerState

_SAME_PROMPT = "waiting for a request that computes the same prompt"


class Admission:
    """Admits waiting requests to a step, one at a time. Does not know their order."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: AdmissionPolicy,
        state: SchedulerState,
        builder: PlanBuilder,
        drafts: Drafts,
    ) -> None:
        self._config = config
        self._policy = policy
        self._state = state
        self._kv = state.kv
        self._pages = state.pages
        self._builder = builder
        self._drafts = drafts

    def is_passed_over(self, request: Request) -> bool:
        """Return True if a request waits for something besides its turn; its wait reason says what."""
        if not is_ready(request):
            if not (request.awaits_kv and request.wait_reason):  # which says for what, and from whom
                request.wait_reason = f"is {request.status.value.replace('_', ' ')}"
        elif request.awaited_page is not None and self._kv.writer_of(request.awaited_page, request):
            request.wait_reason = _SAME_PROMPT
        elif request.row is None and (reason := self._state.resources.reason_to_pass_over(request, self._builder.step)):
            request.wait_reason = reason
        else:
            request.awaited_page = None
            return False
        return True

    def awaits_page(self, request: Request, match: PrefixMatch) -> bool:
        """Pass a request over while one of no worse class is about to compute the page that follows its match."""
        page = self._kv.missing_page(request, match)
        writer = None if page is None else self._kv.writer_of(page, request)
        if writer is None or not self._state.resources.can_follow_to(request, writer, match):
            return False
        request.awaited_page, request.wait_reason = page, _SAME_PROMPT
        return True

    def num_tokens_to_hold(self, request: Request, end: int) -> int:
        """Return the tokens whose pages a request gets that is to have computed `end`."""
        # A request that was preempted and cannot go on where it was begins anew only where all of it fits.
        again = request.num_tokens if request.num_preemptions and not self._state.can_rewind(request) else 0
        return max(end, again, self._policy.num_tokens_to_hold(request, end, self._state))

    def admit(self, request: Request) -> str:
        """Let a waiting request run its first chunk. Return why it must wait, or ""."""
        return self._begin(request) if request.row is None else self._resume(request)

    def _begin(self, request: Request) -> str:
        """Give a request a row, pages and all else that it holds, behind what the cache has of its prompt."""
        state, kv = self._state, self._kv
        if not state.num_free_rows:
            return state.rows.shortage
        if reason := self._policy.reason_to_wait(request, state):
            return reason
        match = state.match(request, self._builder.step)
        if reason := self._reason_to_wait_with(match, request):
            return reason
        num_tokens, reason = self._first_chunk(request, match.num_tokens, match)
        if reason:
            return reason
        hold = self.num_tokens_to_hold(request, match.num_tokens + num_tokens)
        while reason := state.resources.acquire_all(request, match, hold, self._builder.step):
            if not self.drop_draft_pages():
                return reason
        state.begin(request, match)
        self._builder.add_row(request)
        self._builder.schedule(request, num_tokens, 0, kv.pages(request))
        return ""

    def _resume(self, request: Request) -> str:
        """Resume a request that kept its row: a session with new input, or one that a launched step still pins."""
        if request.num_inflight_steps:
            return "waiting for an in-flight step that still uses its row"
        start, first_page = request.num_computed_tokens, len(self._kv.pages(request))
        num_tokens, reason = self._first_chunk(request, start)
        if reason:
            return reason
        hold = self.num_tokens_to_hold(request, start + num_tokens)
        while (new_pages := self._pages.grow(request, hold)) is None:
            if not self.drop_draft_pages():
                return self._pages.reason_to_grow_later(request, hold)
        self._state.start(request)
        self._builder.add_row(request)
        self._builder.schedule(request, num_tokens, first_page, new_pages)
        return ""

    def _reason_to_wait_with(self, match: PrefixMatch, request: Request) -> str:
        """Return why a request should wait for more of its prefix, from another request or from elsewhere, or ""."""
        if self.awaits_page(request, match):
            return _SAME_PROMPT
        num_reserved, num_free_rows = self._pages.num_reserved, self._state.num_free_rows
        for transfers in self._state.transfers:
            if reason := transfers.fetch(request, match, self._builder.step, num_reserved, num_free_rows):
                return reason
        return ""

    def _first_chunk(self, request: Request, start: int, match: PrefixMatch | None = None) -> tuple[int, str]:
        """Return how many tokens a request not yet in the step runs from `start` on, and why it must wait, or ""."""
        num_tokens, reason = self._builder.chunk(request, start, match)
        remaining = request.num_tokens + request.num_pending_tokens - start
        if not reason and num_tokens < remaining and not self._config.enable_chunked_prefill:
            reason = f"needs {remaining} tokens of a step's budget, {self._builder.budget} are left"
        return num_tokens, reason

    def drop_draft_pages(self) -> bool:
        """Take back pages that rejected drafts have left to running requests. Return False if there are none."""
        return self._drafts.drop_pages(self._state.running, self.num_tokens_to_hold)
