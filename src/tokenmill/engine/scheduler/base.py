"""`SchedulerBase`: all of a scheduler but its decisions: requests come, end, are committed and taken back.

A scheduler derives from it and fills plans in `schedule`, by the tools at the end of the class or by its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import ARRIVING, WAITING_FOR_EVENT, FinishReason, Request, RequestStatus, TurnInput
from tokenmill.core.scheduling import Feature, InFlightStep, Kind, SchedulerInterface
from tokenmill.core.transfers import Found, KVQuery, TransferEvent
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.commit_pass import CommitPass
from tokenmill.engine.scheduler.config import SchedulerConfig, policies_of
from tokenmill.engine.scheduler.drafter import DraftCounts, Drafter
from tokenmill.engine.scheduler.plan_builder import PlanBuilder
from tokenmill.engine.scheduler.policies import most_tokens_held
from tokenmill.engine.scheduler.reports import count_reasons, wait_reason
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.seniority import is_ready
from tokenmill.engine.scheduler.sessions import Sessions
from tokenmill.engine.scheduler.state import SchedulerState


class SchedulerBase(SchedulerInterface[KVManager]):
    """Everything of a scheduler but `schedule`.

    Attributes:
        state: every live request, both queues in order, and what requests hold.
        draft_counts: what speculation has brought since the start.
    """

    serves = frozenset({Feature.ORDER, Feature.REPORTS})
    config: SchedulerConfig

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        resources: Iterable[Resource] = (),
        drafters: Sequence[Drafter] = (),
    ) -> None:
        """
        Args:
            resources: what requests hold besides rows and pages, in the order in which they take it.
            drafters: one that proposes tokens which decodes may run ahead, or none: one token a step.

        Raises:
            InvalidConfig: a limit that lets nothing run, or a policy that does not exist.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(config, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {getattr(config, name)}")
        self._policies = policies_of(config)
        self.config, self.kv = config, kv
        self.draft_counts = DraftCounts()
        self.state = SchedulerState(config, self._policies.queue, kv, resources, drafters)
        self._sessions = Sessions(self.state, self._check)

    def resource(self, kind: type[Kind]) -> Kind | None:
        """Return the resource of a kind, or None."""
        return next((one for one in self.state.resources.all if isinstance(one, kind)), None)

    @property
    def step(self) -> int:
        """Number of the newest launched step."""
        return self.state.step

    @property
    def requests(self) -> Mapping[str, Request]:
        """All live requests, by id."""
        return self.state.requests

    def take_preempted(self) -> list[str]:
        """Return the ids of requests preempted since the last call, in order."""
        return self.state.take_preempted()

    def counts(self) -> dict[str, Any]:
        """Return counters since the start, and the state now, with those of all resources: fields of `EngineStats`."""
        state, drafts = self.state, self.draft_counts
        queued = [r for r in state.waiting if is_ready(r) and not r.is_background and r.awaited_page is None]
        return {
            "step": self.step,
            "num_running": len(state.running),
            "num_waiting": len(state.waiting),
            "num_queued": len(queued),
            "waiting_by_reason": count_reasons(state.waiting),
            "num_rows_used": state.rows.num_rows - state.num_free_rows,
            "num_preemptions": state.num_preemptions,
            "num_corrupted": state.num_corrupted,
            "num_drafts": drafts.num_drafts,
            "num_draft_tokens": drafts.num_draft_tokens,
            "num_accepted_tokens": sum(drafts.accepted_per_position),
            "num_accepted_per_position": list(drafts.accepted_per_position),
            **{name: count for one in state.resources.all for name, count in one.counts().items()},
        }

    @property
    def in_flight(self) -> Sequence[InFlightStep]:
        """Launched steps that are not committed, oldest first."""
        return self.state.in_flight

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or a launched step is not committed. Paused sessions do not count."""
        state = self.state
        has_orders = any(transfers.has_orders for transfers in state.transfers)
        return has_orders or bool(state.waiting or state.running or state.in_flight or self._sessions.due)

    @property
    def first_wait_reason(self) -> str:
        """Reason why the first waiting request waits; "" if none waits."""
        return self.state.waiting[0].wait_reason if self.state.waiting else ""

    @property
    def is_stuck(self) -> bool:
        """True if a request could go on, nothing runs, and no launched step's commit could change that.

        Meaningful after a `schedule()` that returned None. It would be a bug: liveness is an invariant.
        """
        if self.state.in_flight or any(transfers.is_busy for transfers in self.state.transfers):
            return False
        return bool(self.state.running) or any(is_ready(request) for request in self.state.waiting)

    def add(self, request: Request) -> None:
        """Take in a request; it waits for its turn.

        Raises:
            InvalidRequest: its id is in use, or it could never run: it needs more pages than there are, or without
                chunked prefill more tokens in a step than the budget has. Nothing has changed then.
        """
        if request.id in self.state.requests:
            raise InvalidRequest(f"the request id {request.id} is in use")
        if request.status not in ARRIVING:
            raise InvalidRequest(f"a request that arrives waits; this one is {request.status.value}")
        self._check(request, most_tokens_held(request))
        self.state.enter(request)

    def wake(self, request_id: str) -> None:
        """Let a request go on that waited for an event, such as its grammar or its remote KV.

        Ignored for requests that wait for no event: unknown ids, a second call, paused sessions.
        """
        request = self.state.requests.get(request_id)
        if request is not None and request.status in WAITING_FOR_EVENT:
            request.move_to(RequestStatus.WAITING)

    def take_queries(self) -> list[KVQuery]:
        """Return the queries for the sources of KV before the next step, only for requests that may begin in it."""
        queries: list[KVQuery] = []
        for transfers in self.state.transfers:
            ready = (r for r in self.state.waiting if is_ready(r) and r.row is None and r.awaited_page is None)
            queries += transfers.look_up(islice(ready, self.state.num_free_rows + 1))
        return queries

    def apply_transfer_event(self, event: TransferEvent) -> None:
        """Apply an event from a source of KV or of encoder outputs."""
        if not isinstance(event, Found) or event.request_id in self.state.requests:
            self.state.queues.num_changes += 1
            for resource in self.state.resources.apply:
                resource.apply(event, self.state.step)

    def extend(self, request_id: str, turn: TurnInput) -> None:
        """Continue a session with further input; see `Sessions.extend`."""
        self._sessions.extend(request_id, turn)

    def begin_turns(self) -> list[TokenOutput]:
        """Resume paused sessions that have further input; called before `schedule`. See `Sessions.begin_turns`."""
        return self._sessions.begin_turns()

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests wherever they are. Unknown and finished ones are ignored: they may have just ended.

        Returns:
            The terminal output of each that was alive.
        """
        requests = [self.state.requests.get(request_id) for request_id in ids]
        return [self._abort(request) for request in requests if request is not None and not request.is_finished]

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in the outcome of the oldest launched step.

        Returns:
            The outputs that the step brought its requests.
        """
        step = self.state.in_flight.popleft()
        return CommitPass(self.state, self._sessions, self.draft_counts, step, result).run()

    def fail_in_flight(self, error: str) -> list[TokenOutput]:
        """End the requests of all launched steps: one of these raised, and the later ones build on it.

        Their pages were never committed, so nothing that the failed steps wrote can be matched. A session whose turn
        had ended before lives on without its row: the runner never heard what a failed step was to tell of it.

        Returns:
            The terminal output of each request that was alive.
        """
        outputs = []
        while self.state.in_flight:
            step = self.state.in_flight.popleft()
            for resource in self.state.resources.end_step:
                resource.end_step(step.plan.step)
            for request in step.requests:
                request.num_inflight_steps -= 1
                if request.awaits_step:
                    self.state.end_request(request, FinishReason.ERROR)
                    outputs.append(TokenOutput(request.id, [], FinishReason.ERROR, error=error))
                elif request.is_finished:
                    self.state.retire(request)
                elif not request.num_inflight_steps:
                    self.state.take_back(request)
        return outputs

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forget all cached prefixes, as after a change of weights.

        Args:
            preempt_running: send running requests back to the queue first, to be recomputed, paused sessions too.

        Returns:
            False if requests hold pages (or a launched step still uses them); nothing is forgotten then.
        """
        if preempt_running:
            for request in list(self.state.running):
                self.state.preempt(request)
            while self.state.preempt_idle():
                pass
        for transfers in self.state.transfers:
            transfers.drop_saves(self.step)
        return self.kv.clear_cache()

    def explain(self, request_id: str) -> str:
        """Return why a request was not scheduled in the last step; "" if it was.

        Raises:
            KeyError: no such request is alive.
        """
        return wait_reason(self.state.requests[request_id], self.state.waiting)

    def check_invariants(self) -> None:
        """Check every invariant of the scheduler's state, for tests."""
        self.state.check_invariants()

    # --- tools of `schedule` ------------------------------------------------------------------------------------------

    def begin_step(self) -> PlanBuilder:
        """Prepare for scheduling a step; return its plan in the making."""
        self.state.begin_step()
        return PlanBuilder(self.config, self.step + 1, self.state.resources)

    def launch(self, builder: PlanBuilder) -> StepPlan | None:
        """Return the plan of a step, which from now on pins its requests; None: nothing is in it."""
        plan = builder.build()
        if plan is not None:
            self.state.launch(plan, tuple(builder.requests))
        return plan

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check(self, request: Request, num_tokens: int) -> None:
        """Raise InvalidRequest for a request that could never run to `num_tokens` tokens."""
        self.state.resources.check_all(request, num_tokens)
        budget = self.config.max_num_batched_tokens
        # The last token is never run; all others may have to be run at once after a preemption.
        needed = max(num_tokens - 1, request.num_prompt_tokens)
        if not self.config.enable_chunked_prefill and needed > budget:
            raise InvalidRequest(f"{num_tokens} tokens need {needed} in a step without chunks; {budget} fit")

    def _abort(self, request: Request) -> TokenOutput:
        self.state.end_request(request, FinishReason.ABORT)
        return TokenOutput(request.id, [], FinishReason.ABORT)
