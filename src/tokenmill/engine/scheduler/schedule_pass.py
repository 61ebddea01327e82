"""`SchedulePass`: fill one plan in one pass over the requests, in the order that a batch policy sets.

There is no prefill and no decode here: a request's computed tokens catch up with the tokens it has (vLLM V1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.core.request import Request
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.config import Policies, SchedulerConfig
from tokenmill.engine.scheduler.draft_pass import add_drafts
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.fairness import find_yielding, serving_order
from tokenmill.engine.scheduler.plan_builder import PlanBuilder, request_seed
from tokenmill.engine.scheduler.reports import Shortage, short_of
from tokenmill.engine.scheduler.room import Room
from tokenmill.engine.scheduler.seniority import is_ready
from tokenmill.engine.scheduler.state import SchedulerState

# Decodes of a step that take hardly longer than one: they wait for weights. Shared out, they would be read more often.
LEAST_SHARE = 16
_SAME_PROMPT = "waits for a request that computes the same prompt"


class SchedulePass:
    """Fills the plan of one step, and records why each other request must wait."""

    def __init__(
        self, config: SchedulerConfig, policies: Policies, state: SchedulerState, drafter: Drafter | None = None
    ) -> None:
        self.builder = PlanBuilder(state.step + 1, config.max_num_batched_tokens)
        self._config = config
        self._state = state
        self._kv = state.kv
        self._reserved: dict[str, int] = {}  # pages that are left to these requests
        self._num_reserved = 0
        self._has_admitted = False
        self._position = 0  # in the waiting queue: all before it are passed over
        self._is_closed = False  # the first one that is not cannot begin in this step
        self._queue_policy = policies.queue
        self._admission = policies.admission
        self._drafter = drafter

    @property
    def is_empty(self) -> bool:
        """True while nothing is scheduled."""
        return not self.builder.requests

    @property
    def is_for_decodes(self) -> bool:
        """True in each second step while the oldest request, which comes before all others, decodes."""
        elder = self._state.seniority.elder
        is_decoding = elder is not None and elder.is_running and not elder.is_prefilling
        return is_decoding and self.builder.step % 2 == 0

    def make_room(self) -> None:
        """Preempt requests of tenants that hold more, so that waiting ones of tenants that hold less can begin.

        Only where tenants take turns or a background request runs, and for as many as the budget lets begin, in order;
        before anything is scheduled, so that no request in the step yields. What an admission policy has promised only
        background requests give back.
        """
        state = self._state
        takes_turns = self._queue_policy.by_tenant and not self._admission.is_promise
        has_lower = bool(state.running) and state.running[-1].is_background
        if not (takes_turns or has_lower) or state.num_changes == state.full_at:
            return
        budget, room = self.builder.budget - len(state.running), Room(state)
        for request in list(state.waiting):
            if self._is_passed_over(request) or request.row is not None:
                continue
            if budget <= 0 and room.num_rows:
                return
            pages = self._kv.num_pages_for(self._num_tokens_to_hold(request, min(request.num_tokens, max(1, budget))))
            matched = 0
            if not room.is_there(pages):
                match = self._kv.match(request, self.builder.step)
                if self._awaits_page(request, match):
                    continue
                matched = len(match.pages)
                pages -= matched
                if not room.is_there(pages, matched):
                    need = room.need(pages, matched)
                    victims = find_yielding(request, need, state.running, self._kv, takes_turns)
                    for victim in victims:
                        state.preempt(victim)
                    if not victims:
                        state.full_at = state.num_changes
                        return
            room.add(pages, matched)
            budget -= request.num_tokens

    def advance(self, which: Callable[[Request], bool] | None = None, lets_in: bool = True) -> bool:
        """Schedule running requests in order. Return True if none was short of pages: only then may others enter.

        Requests that `which` leaves out keep the pages of their next token reserved; else a prompt after them could
        take those pages again and again, be preempted, and no request would advance.

        Args:
            which: selects requests; None: all of them.
            lets_in: where tenants take turns, a waiting request enters before a running one that comes after it; before
                one in the background, always.
        """
        enough_pages, num_decoding = True, 0
        lets_in = lets_in and bool(self._state.waiting)
        # Of a pipeline each step takes its share of the decodes, so that there are some for every stage.
        most_decoding = max(LEAST_SHARE, -(-len(self._state.running) // self._config.num_stages))
        state = self._state
        running, num_decodes = serving_order(
            state.running, state.seniority.elder, self._queue_policy.by_tenant, self._config.max_num_batched_tokens
        )
        self._reserve_next_pages([] if which is None else [request for request in running if not which(request)])
        for number, request in enumerate(running):
            if not request.is_running or request.id in self._reserved:
                continue  # preempted by an earlier one in this very pass, or not meant
            takes_turns = self._queue_policy.by_tenant or request.is_background
            if lets_in and takes_turns and enough_pages and number >= num_decodes:
                self._admit_some(before=request)
            if request.mask_missed or request.has_drafts:
                why = "the mask of its grammar was late" if request.mask_missed else "one runs its draft tokens"
                request.wait_reason = f"waits for launched steps: {why}"
                continue
            remaining = request.num_uncomputed_tokens
            if remaining == 0 or request.will_reach_length:
                continue  # its last token is being sampled by a launched step
            if request.num_pending_tokens and (self._config.num_stages > 1 or self._is_held(request)):
                request.wait_reason = "waits for the launched step that samples its next token"
                continue
            if self.builder.budget == 0:
                request.wait_reason = "the token budget of the step is used up"
                continue
            if remaining == 1 and num_decoding == most_decoding:
                request.wait_reason = "goes with the next step: each stage has a share of the requests"
                continue
            start = request.num_computed_tokens
            num_tokens = 1 if remaining == 1 else self._chunk(start, remaining, self._points(request))
            if request.media:
                num_tokens, reason = self._state.encoder.limit(request, start, num_tokens)
                if not num_tokens:
                    request.wait_reason = reason
                    continue
            num_decoding += remaining == 1
            enough_pages &= self._advance_one(request, num_tokens)
        return enough_pages

    def _is_held(self, request: Request) -> bool:
        return self._drafter is not None and self._drafter.holds(request, len(self._state.running))

    def _reserve_next_pages(self, requests: list[Request]) -> None:
        """Reserve the pages of these requests' next tokens."""
        self._reserved.clear()
        self._num_reserved = 0
        for request in requests:
            self._reserve(request, self._kv.num_missing_pages(request, request.num_computed_tokens + 1))

    def _reserve(self, request: Request, num_pages: int) -> None:
        self._num_reserved += num_pages - self._reserved.get(request.id, 0)
        self._reserved[request.id] = num_pages

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
            if self._is_passed_over(request) or (which is not None and not which(request)):
                self._position += 1
                continue
            request.wait_reason = self._resume(request) if request.row is not None else self._admit(request)
            if request.awaited_page is not None or request.awaits_kv:
                continue  # it is passed over from now on
            if not request.wait_reason:
                limit = None if limit is None else limit - 1
            elif not self._let_idle_yield(request):
                self._is_closed = True
        if not self._is_closed and self._position < len(waiting):
            waiting[self._position].wait_reason = "the token budget of the step is used up"

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
        if self._drafter is not None and self.builder.budget:
            add_drafts(self._drafter, self.builder, self._kv, self._num_reserved)

    def _drop_draft_pages(self) -> bool:
        """Take back pages that rejected drafts have left to running requests. Return False if there are none.

        Leaves requests alone whose launched steps may still write behind the computed tokens.
        """
        if self._drafter is None:
            return False
        num_dropped = 0
        for request in self._state.running:
            if not (request.has_drafts or request.mask_missed):
                end = max(request.num_computed_tokens, request.num_tokens)
                num_dropped += self._kv.trim(request, self._num_tokens_to_hold(request, end))
        return num_dropped > 0

    def explain_waiting(self) -> None:
        """Set the wait reason of the first waiting request if no admission was tried in this step."""
        if not self._state.waiting or self._has_admitted:
            return
        self._state.waiting[0].wait_reason = "running requests come first, and one of them is short of pages"

    def _advance_one(self, request: Request, num_tokens: int) -> bool:
        end = request.num_computed_tokens + num_tokens
        enough_pages = True
        while (new_pages := self._kv.allocate(request, end, self._num_reserved)) is None:
            if self._drop_draft_pages() or self._kv.give_copies(self._state.running):
                continue
            enough_pages = False
            missing = Shortage.of(self._kv, request, end, self._num_reserved)
            if self._state.will_return(missing):
                users = "saves" if self._state.num_saving_pages else "launched steps"
                request.wait_reason = f"waits for {missing} that {users} still use"
                self._reserve(request, self._kv.num_missing_pages(request, end))
                return False
            if not self._state.preempt_idle():
                victim = self._choose_victim()
                self._state.preempt(victim)
                self._num_reserved -= self._reserved.pop(victim.id, 0)
                self._position, self._is_closed = 0, False
                if victim is request:
                    return False
        first_page = len(self._kv.pages(request)) - len(new_pages) if new_pages else 0
        self._schedule(request, num_tokens, first_page, new_pages)
        return enough_pages

    def _schedule(self, request: Request, num_tokens: int, first_page: int, new_pages: list[int]) -> None:
        if request.media:
            self._state.encoder.take(request, request.num_computed_tokens, num_tokens, self.builder.step)
        if self._state.states is not None:
            self._state.states.take(request, request.num_computed_tokens, num_tokens, self.builder.step)
        self.builder.schedule(request, num_tokens, first_page, new_pages)
        if self._kv.windows is not None:
            self.builder.enter_windows(request, self._kv.windows)

    def _choose_victim(self) -> Request:
        """Choose the request to preempt among those not in the step yet; the elder only if it is the last of them."""
        scheduled = {request.id for request in self.builder.requests}
        candidates = [request for request in self._state.running if request.id not in scheduled]
        if len(candidates) > 1 and candidates[0] is self._state.seniority.elder:
            del candidates[0]
        return self._queue_policy.choose_victim(candidates)

    def _is_passed_over(self, request: Request) -> bool:
        if not is_ready(request):
            if not (request.awaits_kv and request.wait_reason):  # which says for what, and from whom
                request.wait_reason = f"is {request.status.value.replace('_', ' ')}"
        elif request.awaited_page is not None and self._kv.writer_of(request.awaited_page, request):
            request.wait_reason = _SAME_PROMPT
        elif request.row is None and (reason := self._state.adapters.reason_to_wait(request, self.builder.step)):
            request.wait_reason = reason
        else:
            request.awaited_page = None
            return False
        return True

    def _awaits_page(self, request: Request, match: PrefixMatch) -> bool:
        """Pass a request over while one of no worse class is about to compute the page that follows its match."""
        page = self._kv.missing_page(request, match)
        writer = None if page is None else self._kv.writer_of(page, request)
        if writer is None or not self._leaves_state(writer, request, match):
            return False
        request.awaited_page, request.wait_reason = page, _SAME_PROMPT
        return True

    def _leaves_state(self, writer: Request, request: Request, match: PrefixMatch) -> bool:
        """Return True if a request that computes a longer prefix will leave this one a state to begin with."""
        states = self._state.states
        return states is None or states.wish(writer, self._kv.num_common_tokens(request, writer), match.num_tokens)

    def _admit(self, request: Request) -> str:
        """Give a waiting request a row, pages and its first chunk. Return why it must wait, or ""."""
        if not self._state.num_free_rows:
            return f"needs a row, all {self._state.rows.num_rows} are in use"
        if reason := self._admission.reason_to_wait(request, self._state):
            return reason
        match = self._kv.match(request, self.builder.step)
        if reason := self._reason_to_wait(request, match):
            return reason
        points = self._points(request, match)
        num_tokens, reason = self._first_chunk(request, match.num_tokens, points)
        if reason:
            return reason
        if reason := self._acquire(request, match, match.num_tokens + num_tokens, points):
            return reason
        self._state.start(request)
        self._kv.count_match(request, match)
        request.num_computed_tokens = match.num_tokens
        request.num_charged_tokens = max(request.num_charged_tokens, match.num_tokens)
        if not request.num_preemptions:
            # What it finds again of its own after a preemption is no gift of the cache.
            request.num_cached_tokens = min(match.num_tokens, request.num_prompt_tokens)
        self._launch_row(request, num_tokens, 0, self._kv.pages(request))
        return ""

    def _acquire(self, request: Request, match: PrefixMatch, end: int, points: Sequence[int]) -> str:
        """Give a request pages up to `end`, and a recurrent state. Return why it must wait, or ""."""
        hold = self._num_tokens_to_hold(request, end)
        while not self._kv.acquire(request, match, hold, self.builder.step, self._num_reserved):
            if not self._drop_draft_pages():
                num_pages = self._kv.num_pages_for(hold)
                return short_of(self._kv, num_pages - len(match.pages), num_pages, self._num_reserved)
        if self._state.states is None or self._state.states.begin(request, match, points):
            return ""
        self._kv.release(request, self.builder.step)
        return "needs a recurrent state, launched steps have all that are left"

    def _reason_to_wait(self, request: Request, match: PrefixMatch) -> str:
        """Return why a request whose turn has come should not compute its unmatched tokens yet, or ""."""
        if self._awaits_page(request, match):
            return _SAME_PROMPT
        if self._state.transfers is None:
            return ""
        num_free_rows = self._state.num_free_rows
        return self._state.transfers.fetch(request, match, self.builder.step, self._num_reserved, num_free_rows)

    def _resume(self, request: Request) -> str:
        """Resume a request that kept its row: a session with new input, or one that a launched step still pins."""
        if request.num_inflight_steps:
            return "waits for a launched step that still uses its row"
        num_tokens, reason = self._first_chunk(request, request.num_computed_tokens, self._points(request))
        if reason:
            return reason
        hold = self._num_tokens_to_hold(request, request.num_computed_tokens + num_tokens)
        first_page = len(self._kv.pages(request))
        while (new_pages := self._kv.allocate(request, hold, self._num_reserved)) is None:
            if self._drop_draft_pages():
                continue
            num_pages = self._kv.num_pages_for(hold)
            return short_of(self._kv, num_pages - first_page, num_pages, self._num_reserved, "more ")
        self._state.start(request)
        self._launch_row(request, num_tokens, first_page, new_pages)
        return ""

    def _first_chunk(self, request: Request, start: int, points: Sequence[int]) -> tuple[int, str]:
        """Return how many tokens a request not yet in the step runs from `start` on, and why it must wait, or ""."""
        remaining = request.num_tokens + request.num_pending_tokens - start
        num_tokens = self._chunk(start, remaining, points)
        if request.media:
            num_tokens, reason = self._state.encoder.limit(request, start, num_tokens)
            if not num_tokens:
                return 0, reason
        if num_tokens < remaining and not self._config.enable_chunked_prefill:
            return 0, f"needs {remaining} tokens of a step's budget, {self.builder.budget} are left"
        return num_tokens, ""

    def _num_tokens_to_hold(self, request: Request, end: int) -> int:
        # What one computed before it was preempted is lost with its state: it begins anew only where all of it fits.
        again = request.num_tokens if request.num_preemptions and self._state.states is not None else 0
        return max(end, again, self._admission.num_tokens_to_hold(request, end, self._state))

    def _launch_row(self, request: Request, num_tokens: int, first_page: int, new_pages: list[int]) -> None:
        slot = self._state.adapters.number(request) if request.cache_key.adapter else 0
        state = 0 if self._state.states is None else self._state.states.slot_of(request)
        self.builder.add_row(request, request_seed(request, self._config.seed), slot, state)
        self._schedule(request, num_tokens, first_page, new_pages)

    def _points(self, request: Request, match: PrefixMatch | None = None) -> Sequence[int]:
        """Return the token counts after which its recurrent state is to be kept; see `StateSlots.points`."""
        return () if self._state.states is None else self._state.states.points(request, match)

    def _chunk(self, start: int, remaining: int, points: Sequence[int]) -> int:
        """Return how many tokens of a request to run from `start` on; at most one of the points is among them."""
        if not self._config.enable_chunked_prefill:
            return min(remaining, self.builder.budget)
        num_tokens = min(remaining, self._config.largest_chunk, self.builder.budget)
        inside = [point for point in points if start < point <= start + num_tokens]
        return inside[0] - start if len(inside) > 1 else num_tokens
