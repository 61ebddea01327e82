"""`SchedulerState`: every live request, its queue, what it holds, and the launched steps that pin it.

A launched step pins what it uses: ending or preempting a request only marks it, and all that it holds returns when the
last launched step that uses it is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.core.scheduling import InFlightStep
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.policies import QueuePolicy
from tokenmill.engine.scheduler.queues import Queues, RequestQueue
from tokenmill.engine.scheduler.resources.pages import Pages
from tokenmill.engine.scheduler.resources.resource import PageGroup, Resource, Resources
from tokenmill.engine.scheduler.resources.rows import Rows
from tokenmill.engine.scheduler.resources.transfers import Transfers

_LEAVING = frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED})


class SchedulerState:
    """Moves requests between waiting, running, paused and gone.

    Attributes:
        rows, pages: held by every running request. resources: these two and all others, known by their hooks alone.
        transfers: those of the resources that move KV.
        drafters: none or one; told of each request that is gone for good.
        requests: all live ones, by id, in order of arrival.
        step: number of the newest launched step.
        preempted: ids of requests preempted since the last `take_preempted`.
        full_at: `queues.num_changes` when all rows or pages were in use, and no request would yield any.
        num_corrupted: requests that ended because the model gave no finite numbers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: QueuePolicy,
        kv: KVManager,
        resources: Iterable[Resource] = (),
        drafters: Sequence[Drafter] = (),
    ) -> None:
        others = tuple(resources)
        self.kv = kv
        self.rows = Rows(config.max_num_seqs)
        self.pages = Pages(kv, [one for one in others if isinstance(one, PageGroup)])
        self.resources = Resources([self.rows, self.pages, *others])
        self.transfers = [one for one in others if isinstance(one, Transfers)]
        self.drafters = tuple(drafters)
        self.queues = Queues(policy, config.patience)
        self.waiting: RequestQueue = self.queues.waiting
        self.running: RequestQueue = self.queues.running
        self.in_flight: deque[InFlightStep] = deque()
        self.requests: dict[str, Request] = {}
        self.step = 0
        self.num_preemptions = 0
        self.preempted: list[str] = []
        self.num_corrupted = 0
        self.full_at = -1
        self._too_far: set[str] = set()  # sessions that launched steps have run on behind the end of their turn

    # --- the view of policies and resources -------------------------------------------------------------------------

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
    def is_idle(self) -> bool:
        """True while no request runs and no step is launched."""
        return not self.running and not self.in_flight

    # --- the way of a request ---------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Take in a new request."""
        self.requests[request.id] = request
        self.queues.enter(request)

    def begin_step(self) -> None:
        """Prepare for scheduling a step: update the order, and take from requests what they must give up."""
        self.pages.unreserve_all()
        self.queues.begin_step(self.step + 1, self, self.requests)
        for resource in self.resources.begin_step:
            for request in resource.begin_step(self.step + 1, self):
                if request.is_running:
                    self.preempt(request)
                elif request.is_paused and not request.num_inflight_steps:
                    self.take_back(request)

    def start(self, request: Request) -> None:
        """Run a waiting request that holds all that it needs."""
        self.queues.num_changes += 1
        self.waiting.remove(request)
        self.running.add(request)
        request.move_to(RequestStatus.RUNNING)
        self.kv.announce(request)

    def match(self, request: Request, step: int) -> PrefixMatch:
        """Find the cached prefix behind which a request without a row can begin."""
        return self.resources.matched(request, self.kv.match(request, step), step)

    def begin(self, request: Request, match: PrefixMatch) -> None:
        """Run a waiting request that has just got all that it needs, behind the match that it has locked."""
        self.start(request)
        self.kv.count_match(request, match)
        request.num_computed_tokens = match.num_tokens
        request.num_charged_tokens = max(request.num_charged_tokens, match.num_tokens)
        if not request.num_preemptions:
            # What it finds again of its own after a preemption is no gift of the cache.
            request.num_cached_tokens = min(match.num_tokens, request.num_prompt_tokens)
            request.num_external_cached_tokens = min(request.num_external_cached_tokens, request.num_cached_tokens)

    def launch(self, plan: StepPlan, requests: tuple[Request, ...]) -> None:
        """Record a launched step: pin its requests, and charge their tenants."""
        self.step = plan.step
        self.in_flight.append(InFlightStep(plan, requests))
        if requests:
            self.queues.charge(requests, plan.num_tokens)

    def preempt(self, victim: Request) -> None:
        """Send a running request back to its place in the queue, to be recomputed later."""
        self.running.remove(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        victim.wait_reason = "was preempted for a request before it"
        self.num_preemptions += 1
        self.preempted.append(victim.id)
        self.waiting.add(victim)
        self.retire(victim)

    def take_preempted(self) -> list[str]:
        """Return the ids of requests preempted since the last call, in order."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def begin_turn(self, request: Request) -> None:
        """Queue a session that has further input, as one that has just come."""
        self.queues.seniority.forget_request(request, self.step)
        self.requests[request.id] = self.requests.pop(request.id)
        self.queues.enter_again(request)

    def preempt_idle(self, but: Request | None = None) -> bool:
        """Take what it holds from a session between two turns. Return False if none but `but` holds anything.

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
        """Take what it holds from a request that neither runs nor ends: a session, perhaps with new input."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request)

    def can_rewind(self, request: Request) -> bool:
        """Return False if a request begins anew when fewer of its tokens count than launched steps have run."""
        return all(resource.can_rewind(request) for resource in self.resources.can_rewind)

    def rewind(self, request: Request, is_cut: bool = False) -> None:
        """Take in that fewer tokens of a request are computed than launched steps have run.

        Args:
            is_cut: its turn has ended before the last of the drafts that were right.
        """
        if self.can_rewind(request):
            return
        if request.is_running:
            self.preempt(request)
        elif request.is_paused and (request.num_inflight_steps or is_cut):
            self._too_far.add(request.id)

    def end_request(self, request: Request, reason: FinishReason) -> None:
        """End a request wherever it is."""
        if not request.is_paused:
            self.queues.queue_of(request).remove(request)
        request.finish(reason)
        self.retire(request)

    def settle(self, request: Request) -> None:
        """Release what a request that does not run still holds, once no launched step uses it."""
        if request.num_inflight_steps == 0 and request.id in self._too_far and request.status not in _LEAVING:
            self.take_back(request)
        self.retire(request)

    def retire(self, request: Request) -> None:
        """Take what it holds from an ended or preempted request, unless a launched step still uses it."""
        if request.is_finished:
            for resource in self.resources.ended:
                resource.ended(request)
        if request.num_inflight_steps or request.status not in _LEAVING:
            return
        self._release(request)
        if request.is_finished:
            del self.requests[request.id]
            self.queues.leave(request)
            for drafter in self.drafters:
                drafter.forget_request(request)

    def _release(self, request: Request) -> None:
        self.queues.num_changes += 1
        if request.row is not None:
            self.resources.release_all(request, self.step)
            self._too_far.discard(request.id)
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0

    # --- what comes back by itself ----------------------------------------------------------------------------------

    @property
    def num_saving_pages(self) -> int:
        """Number of pages that are held only by saves."""
        return self.kv.num_returned_by((), self._saving())

    def num_returning_rows(self) -> int:
        """Return the number of rows of ended and preempted requests that return once launched steps are committed."""
        return len(self._leaving())

    def will_return(self, missing: Iterable[int]) -> bool:
        """Return True if the launched steps, once committed, give back the missing pages of each group."""
        return all(back >= lack for back, lack in zip(self.num_returning_pages(), missing, strict=True))

    def num_returning_pages(self) -> list[int]:
        """Return the number of pages of each group that only these requests and saves hold."""
        return self.pages.num_returned_by(self._leaving(), self._saving())

    def _leaving(self) -> Collection[Request]:
        return {r.id: r for step in self.in_flight for r in step.requests if r.status in _LEAVING}.values()

    def _saving(self) -> list[RadixNode]:
        return [node for transfers in self.transfers for node in transfers.saving]

    def check_invariants(self) -> None:
        """Raise AssertionError if the books of any owners disagree. For tests: O(everything)."""
        launched = [request for step in self.in_flight for request in step.requests]
        with_rows = [request for request in self.requests.values() if request.row is not None]
        owners = {r.id: r for r in [*self.running, *with_rows, *launched]}
        plans = [step.plan for step in self.in_flight]
        for resource in self.resources.all:
            resource.check_invariants(list(owners.values()), plans)
        for request in owners.values():
            assert request.num_inflight_steps == sum(r is request for r in launched), "in-flight steps are off"
            assert request.num_tokens + request.num_pending_tokens <= request.max_tokens_total, "past its length"
        self.queues.check_invariants(self.requests)
        paused = [request for request in self.requests.values() if request.is_paused]
        assert {r.id for r in [*self.waiting, *paused, *owners.values()]} == set(self.requests), "a request is lost"
