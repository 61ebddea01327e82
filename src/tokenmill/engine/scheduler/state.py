"""`SchedulerState`: every live request, its queue, its row, its pages, and the launched steps that pin them.

A launched step pins what it uses: ending or preempting a request only marks it, and its row and pages return when the
last launched step that uses them is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.fairness import Rounds
from tokenmill.engine.scheduler.policies import QueuePolicy
from tokenmill.engine.scheduler.queue import RequestQueue
from tokenmill.engine.scheduler.reports import Shortage
from tokenmill.engine.scheduler.resources.adapter_slots import AdapterSlots
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache
from tokenmill.engine.scheduler.resources.state_slots import StateSlots
from tokenmill.engine.scheduler.row_pool import RowPool
from tokenmill.engine.scheduler.seniority import Seniority, is_ready
from tokenmill.engine.scheduler.transfers import Transfers

_LEAVING = frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED})


@dataclass(slots=True)
class InFlightStep:
    """A launched step that is not committed yet.

    Attributes:
        requests: the requests that it pins, in batch order.
        outcome: its outcome; None until an executor has launched it.
    """

    plan: StepPlan
    requests: tuple[Request, ...]
    outcome: StepOutcome | None = None

    def result(self) -> StepResult:
        """Wait for the outcome and return it. Raises what the step raised."""
        assert self.outcome is not None, f"step {self.plan.step} was given to no executor"
        return self.outcome.result()


class SchedulerState:
    """Moves requests between waiting, running, paused and gone.

    Attributes:
        num_changes: how often the queues, or the order in them, have changed.
        preempted: ids of requests preempted since the last `take_preempted`.
        adapters: the slots of adapters. encoder: the outputs of images.
        states: the slots of recurrent states; None: the model has none.
        seniority: finds the elder, which comes before all others.
        full_at: `num_changes` when all rows or pages were in use, and no request would yield any to waiting ones.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: QueuePolicy,
        kv: KVManager,
        adapters: AdapterSlots,
        encoder: EncoderCache,
        drafter: Drafter | None = None,
        transfers: Transfers | None = None,
        states: StateSlots | None = None,
    ) -> None:
        """
        Args:
            drafter: told of each request that is gone for good.
        """
        self.kv = kv
        self.transfers = transfers
        self.adapters = adapters
        self.encoder = encoder
        self.states = states
        self._drafter = drafter
        self._policy = policy
        self._rounds = Rounds() if policy.by_tenant else None
        self.rows = RowPool(config.max_num_seqs)
        self.seniority = Seniority(config.patience)
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.in_flight: deque[InFlightStep] = deque()
        self.requests: dict[str, Request] = {}
        self.step = 0
        self.num_preemptions = 0
        self.preempted: list[str] = []
        self.num_corrupted = 0
        self.num_changes = 0
        self.full_at = -1
        self._ahead: set[str] = set()  # sessions whose recurrent state has run on behind the end of their turn

    @property
    def num_free_rows(self) -> int:
        """Number of rows that can be taken now."""
        return self.rows.num_free

    @property
    def num_available_pages(self) -> int:
        """Number of pages that can be taken now: free ones, and those that only the prefix cache holds."""
        return self.kv.num_available

    @property
    def num_pages(self) -> int:
        """Number of all pages."""
        return self.kv.pool.num_usable

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.kv.page_size

    @property
    def num_saving_pages(self) -> int:
        """Number of pages that are held only by saves."""
        return 0 if self.transfers is None else self.kv.num_returned_by((), self.transfers.saving)

    def enter(self, request: Request) -> None:
        """Take in a new request."""
        self.requests[request.id] = request
        self._set_ranks([request] if self._rounds is None else self._rounds.join(request))
        self.waiting.add(request)

    def begin_step(self) -> None:
        """Prepare for scheduling a step: update ranks that change with time, and free adapter slots."""
        changed = [request for request in self._policy.changed(self, self.step + 1) if request.id in self.requests]
        for request in changed:
            request.rank = self._rank(request)
        if changed:
            self.num_changes += 1
            self.waiting.sort()
            self.running.sort()
        self.encoder.begin()
        elder = self.seniority.chosen(self.step + 1, self.requests.values())
        if elder is not None:
            self._set_ranks([elder])
            self.waiting.sort()
        if self.adapters.num_slots:
            self._free_slots()

    def begin_turn(self, request: Request) -> None:
        """Queue a session that has further input, as one that has just come."""
        self.seniority.forget(request, self.step)
        self.requests[request.id] = self.requests.pop(request.id)
        request.rank = self._rank(request)
        self.waiting.add(request)

    def launch(self, plan: StepPlan, requests: tuple[Request, ...]) -> None:
        """Record a launched step: pin its requests, and charge their tenants."""
        self.step = plan.step
        self.in_flight.append(InFlightStep(plan, requests))
        if self._rounds is not None and requests:
            self._set_ranks(self._rounds.charge(requests, plan.num_tokens))

    def start(self, request: Request) -> None:
        """Run a waiting request whose pages are there; give it a row unless it has kept one."""
        self.num_changes += 1
        self.waiting.remove(request)
        self.running.add(request)
        request.move_to(RequestStatus.RUNNING)
        if request.row is None:
            request.row = self.rows.take()
            self.adapters.join(request, self.step + 1)
        self.kv.announce(request)

    def preempt(self, victim: Request) -> None:
        """Send a running request back to its place in the queue, to be recomputed later."""
        self.running.remove(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        victim.wait_reason = "was preempted: what it held was needed by a request before it"
        self.num_preemptions += 1
        self.preempted.append(victim.id)
        self.waiting.add(victim)
        self.retire(victim)

    def _free_slots(self) -> None:
        """Preempt users of a slot that another adapter has waited for long enough."""
        is_idle = not self.running and not self.in_flight
        if is_idle:  # no step would pass in which it is noted who waits
            for request in self.waiting:
                if request.row is None and is_ready(request):
                    self.adapters.reason_to_wait(request, self.step + 1)
        for request in self.adapters.yielding(self.step + 1, is_idle):
            if request.is_running:
                self.preempt(request)
            elif request.is_paused and not request.num_inflight_steps:
                self.take_back(request)

    def take_preempted(self) -> list[str]:
        """Return the ids of requests preempted since the last call, in order."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def preempt_idle(self, but: Request | None = None) -> bool:
        """Take row and pages from a session between two turns. Return False if none but `but` has any.

        The victim is the last in policy order and keeps its place. Its next turn finds what the prefix cache has kept
        and recomputes the rest.
        """
        owners = [r for r in self.requests.values() if r.row is not None and not r.is_running and r is not but]
        idle = [request for request in owners if not request.num_inflight_steps]
        if not idle:
            return False
        self.take_back(max(idle, key=lambda request: request.rank))
        return True

    def take_back(self, request: Request) -> None:
        """Take row and pages from a request that neither runs nor ends: a session, perhaps with new input."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request wherever it is."""
        if not request.is_paused:
            self.queue_of(request).remove(request)
        request.finish(reason)
        self.retire(request)

    def queue_of(self, request: Request) -> RequestQueue:
        """Return the queue of a request; paused and finished requests are in none."""
        return self.running if request.is_running else self.waiting

    def retire(self, request: Request) -> None:
        """Take row and pages from an ended or preempted request, unless a launched step still uses them."""
        if self.transfers is not None and request.is_finished:
            self.transfers.ended(request)
        if request.num_inflight_steps or request.status not in _LEAVING:
            return
        self._release(request)
        if request.is_finished:
            del self.requests[request.id]
            self.adapters.forget(request)
            if self._rounds is not None:
                self._rounds.leave(request)
            if self._drafter is not None:
                self._drafter.forget(request)

    def keep_window(self, request: Request, end: int) -> None:
        """Release what lies behind a request's window: a step that ran it up to `end` is committed.

        The launched steps begin behind that, and so does what follows, unless it begins where a turn has ended or a
        token is sampled again.
        """
        if self.kv.windows is not None and request.row is not None:
            num_computed = min(end, request.num_computed_tokens)
            self.kv.windows.keep(request.id, num_computed, not request.num_inflight_steps)

    def keep_state(self, request: Request, step: int) -> None:
        """Assign the state that a step has kept of a request to the last of its pages in the prefix cache."""
        if self.states is None or not (end := self.states.saved_at(request, step)):
            return
        page = self.kv.cached_page(request, end)
        if page is not None:
            self.states.keep(request, step, page)

    def end_step(self, step: int) -> None:
        """Release the states that a committed or failed step has kept without use."""
        if self.states is not None:
            self.states.end_step(step)

    def go_back(self, request: Request) -> None:
        """Take in that fewer tokens of a request are computed than launched steps have run.

        A recurrent state cannot go back: it begins anew from the last one that was kept of the request's tokens.
        """
        if self.states is None:
            return
        if request.is_running:
            self.preempt(request)
        elif request.is_paused and request.num_inflight_steps:
            self._ahead.add(request.id)

    def settle(self, request: Request) -> None:
        """Release what a request that does not run still holds, once no launched step uses it."""
        if request.num_inflight_steps == 0 and request.id in self._ahead and request.status not in _LEAVING:
            self.take_back(request)
        self.retire(request)

    def num_returning_rows(self) -> int:
        """Return the number of rows of ended and preempted requests that return once launched steps are committed."""
        return len(self._leaving())

    def num_returning_pages(self) -> int:
        """Return the number of pages that only these requests and saves hold."""
        saving = () if self.transfers is None else self.transfers.saving
        return self.kv.num_returned_by(self._leaving(), saving)

    def num_returning_windows(self) -> int:
        """Return the number of window pages promised to the same requests."""
        windows = self.kv.windows
        return 0 if windows is None else sum(windows.promised_to(request.id) for request in self._leaving())

    def will_return(self, missing: Shortage) -> bool:
        """Return True if the launched steps, once committed, give back the missing pages."""
        return self.num_returning_pages() >= missing.pages and self.num_returning_windows() >= missing.windows

    def _leaving(self) -> Collection[Request]:
        return {r.id: r for step in self.in_flight for r in step.requests if r.status in _LEAVING}.values()

    def _set_ranks(self, requests: list[Request]) -> None:
        """Update the ranks of these requests and restore the order of both queues."""
        self.num_changes += bool(requests)
        for request in requests:
            request.rank = self._rank(request)
        if len(requests) > 1 or (requests and requests[0].is_running):
            self.waiting.sort()
            self.running.sort()

    def _rank(self, request: Request) -> tuple[tuple[int, Any], int, int]:
        # There is one elder at most, so below 0 what the policy says is compared with nothing.
        precedence = -1 if request is self.seniority.elder else int(request.is_background)
        round = 0 if self._rounds is None else self._rounds.round_of(request)
        return (precedence, self._policy.rank(request)), round, request.arrival

    def _release(self, request: Request) -> None:
        self.num_changes += 1
        if self.transfers is not None:
            self.transfers.leaving(request)
        if request.row is not None:
            self.rows.give_back(request.row)
            self.adapters.leave(request, self.step)
            self.encoder.leave(request)
            if self.states is not None:
                self.states.leave(request)
            self.kv.release(request, self.step)
            self._ahead.discard(request.id)
            request.row = None
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0

    def check_invariants(self) -> None:
        """Raise AssertionError if the books of any owners disagree. For tests: O(everything)."""
        self.kv.check_invariants()
        if self.transfers is not None:
            self.transfers.check_invariants()
        launched = [request for step in self.in_flight for request in step.requests]
        paused = [request for request in self.requests.values() if request.row is not None]
        owners = {r.id: r for r in [*self.running, *paused, *launched]}
        rows = [request.row for request in owners.values()]
        assert len(set(rows)) == len(rows) and None not in rows, "two requests own one row, or one owns none"
        self.adapters.check_invariants(owners.values())
        self.encoder.check_invariants(owners.values())
        if self.states is not None:
            self.states.check_invariants(owners.values(), self.kv.cached_pages())
        assert len(rows) + self.rows.num_free == self.rows.num_rows, "a row is lost"
        for request in owners.values():
            assert request.num_inflight_steps == sum(r is request for r in launched), "in-flight steps are off"
            held = len(self.kv.pages(request)) * self.kv.page_size
            assert request.num_computed_tokens <= held, "a token without a page"
            assert request.num_tokens + request.num_pending_tokens <= request.max_tokens_total, "past its length"
        if self.kv.windows is not None:
            self.kv.windows.check_invariants({r.id: self._begin_of(r) for r in owners.values()})
        assert all(r.is_running for r in self.running), "a request in the running queue that does not run"
        assert not any(r.is_running or r.is_finished for r in self.waiting), "a waiting request that runs or ended"
        idle = [request for request in self.requests.values() if request.is_paused]
        known = {r.id for r in [*self.waiting, *idle, *owners.values()]}
        assert known == set(self.requests), "a request is lost"
        for queue in (self.waiting, self.running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(ranks), "a queue is out of order"
            assert all(request.rank == self._rank(request) for request in queue), "a rank is out of date"
        if self._rounds is not None:
            self._rounds.check_invariants(self.requests)

    def _begin_of(self, request: Request) -> tuple[int, int]:
        """Return where the next step of a request begins, launched ones included, and the number of its pages."""
        launched = [step.plan for step in self.in_flight if request in step.requests]
        begins = [int(plan.num_computed[plan.request_ids.index(request.id)]) for plan in launched]
        return min([request.num_computed_tokens, *begins]), len(self.kv.pages(request))
