"""The scheduler: `schedule()` makes a plan, `commit()` takes in its outcome.

Several steps may be launched before the first is committed (overlap). Knows no torch, no sockets and no clock: the
same calls give the same plans, so a schedule can be recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import RowFailure, StepPlan, StepResult
from tokenmill.core.request import ARRIVING, WAITING_FOR_EVENT, FinishReason, Request, RequestStatus, TurnInput
from tokenmill.core.transfers import Found, KVNews, KVQuery
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.config import SchedulerConfig, find_policies
from tokenmill.engine.scheduler.drafter import DraftCounts, Drafter
from tokenmill.engine.scheduler.policies import most_tokens_held
from tokenmill.engine.scheduler.queue import RequestQueue
from tokenmill.engine.scheduler.reports import add_extras, count_reasons, prompt_report, wait_reason
from tokenmill.engine.scheduler.resources.adapter_slots import AdapterSlots
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache
from tokenmill.engine.scheduler.resources.state_slots import StateCounts, StateSlots
from tokenmill.engine.scheduler.schedule_pass import SchedulePass
from tokenmill.engine.scheduler.seniority import is_ready
from tokenmill.engine.scheduler.sessions import Sessions
from tokenmill.engine.scheduler.state import InFlightStep, SchedulerState
from tokenmill.engine.scheduler.transfers import Transfers


class Scheduler:
    """Holds all requests between their arrival and their last output.

    Attributes:
        adapters: the slots of adapters.
        encoder: the outputs of images.
        draft_counts: what speculation has brought since the start.
        transfers: KV that is looked up, loaded and saved elsewhere; None: there is none.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, drafter: Drafter | None = None, transfers: Transfers | None = None
    ) -> None:
        """
        Args:
            drafter: proposes tokens that decodes may run ahead; None: one token a step.

        Raises:
            InvalidConfig: a limit that lets nothing run, or a policy that does not exist.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(config, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {getattr(config, name)}")
        self._policies = find_policies(config.policy, config.batch_policy, config.admission)
        self.config, self.kv, self._drafter = config, kv, drafter
        self.draft_counts = DraftCounts()
        self.adapters = AdapterSlots(config.max_loras, config.lora_patience)
        self.encoder = EncoderCache(
            config.encoder_budget, config.encoder_cache_tokens, not config.disable_chunked_mm_input
        )
        self._state = SchedulerState(
            config,
            self._policies.queue,
            kv,
            self.adapters,
            self.encoder,
            drafter,
            transfers,
            StateSlots.over(kv, config.state_slots) if config.state_slots else None,
        )
        self.transfers = transfers
        self._sessions = Sessions(self._state, self._check_size)

    @property
    def step(self) -> int:
        """Number of the newest launched step."""
        return self._state.step

    @property
    def requests(self) -> Mapping[str, Request]:
        """All live requests, by id."""
        return self._state.requests

    @property
    def num_rows_used(self) -> int:
        """Number of rows that requests own."""
        return self._state.rows.num_rows - self._state.num_free_rows

    @property
    def num_preemptions(self) -> int:
        """Number of times a request has lost what it held, since the start."""
        return self._state.num_preemptions

    def take_preempted(self) -> list[str]:
        """Return the ids of requests preempted since the last call, in order."""
        return self._state.take_preempted()

    @property
    def state_counts(self) -> StateCounts:
        """Counts of recurrent states kept, used and given up."""
        return StateCounts() if self._state.states is None else self._state.states.counts

    @property
    def num_corrupted(self) -> int:
        """Number of requests that ended because the model gave no finite numbers."""
        return self._state.num_corrupted

    @property
    def in_flight(self) -> Sequence[InFlightStep]:
        """Launched steps that are not committed, oldest first."""
        return self._state.in_flight

    @property
    def num_running(self) -> int:
        """Number of requests that own a row and make progress."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row, pages, budget or something else."""
        return len(self._state.waiting)

    @property
    def num_queued(self) -> int:
        """Number of waiting requests, without background ones, that only rows, pages or budget keep from running."""
        waiting = [request for request in self._state.waiting if not request.is_background]
        return sum(is_ready(request) and request.awaited_page is None for request in waiting)

    def waiting_by_reason(self) -> dict[str, int]:
        """Count waiting requests by reason.

        `capacity`: rows, pages or budget; `same_prompt`: another request that computes what they would. Rare reasons
        appear only while a request waits for them.
        """
        return count_reasons(self._state.waiting)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or a launched step is not committed. Paused sessions do not count."""
        state = self._state
        has_orders = self.transfers is not None and self.transfers.has_orders
        return has_orders or bool(state.waiting or state.running or state.in_flight or self._sessions.due)

    @property
    def first_wait_reason(self) -> str:
        """Reason why the first waiting request waits; "" if none waits."""
        return self._state.waiting[0].wait_reason if self._state.waiting else ""

    @property
    def is_stuck(self) -> bool:
        """True if a request could go on, nothing runs, and no launched step's commit could change that.

        Meaningful after a `schedule()` that returned None. It would be a bug: liveness is an invariant.
        """
        if self._state.in_flight or (self.transfers is not None and self.transfers.is_busy):
            return False
        return bool(self._state.running) or any(is_ready(request) for request in self._state.waiting)

    def add(self, request: Request) -> None:
        """Take in a request; it waits for its turn.

        Raises:
            InvalidRequest: its id is in use, or it could never run: it needs more pages than there are, or without
                chunked prefill more tokens in a step than the budget has. Nothing has changed then.
        """
        if request.id in self._state.requests:
            raise InvalidRequest(f"the request id {request.id} is in use")
        if request.status not in ARRIVING:
            raise InvalidRequest(f"a request that arrives waits; this one is {request.status.value}")
        self._check_size(most_tokens_held(request))
        if request.media:
            self.encoder.check(request.media, self.config.largest_chunk, not self.config.enable_chunked_prefill)
        self._state.enter(request)

    def wake(self, request_id: str) -> None:
        """Let a request go on that waited for an event, such as its grammar or its remote KV.

        Ignored for requests that wait for no event: unknown ids, a second call, paused sessions.
        """
        request = self._state.requests.get(request_id)
        if request is not None and request.status in WAITING_FOR_EVENT:
            request.move_to(RequestStatus.WAITING)

    def take_queries(self) -> list[KVQuery]:
        """Return the queries for the sources of KV before the next step, only for requests that may begin in it."""
        if self.transfers is None:
            return []
        ready = (r for r in self._state.waiting if is_ready(r) and r.row is None and r.awaited_page is None)
        self.transfers.ask(islice(ready, self._state.num_free_rows + 1))
        return self.transfers.take_queries()

    def take_news(self, news: KVNews) -> None:
        """Take in news from sources of KV."""
        assert self.transfers is not None, "news of KV from elsewhere, and no source"
        if not isinstance(news, Found) or news.request_id in self._state.requests:
            self._state.num_changes += 1
            self.transfers.apply(news, self._state.step)

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
        requests = [self._state.requests.get(request_id) for request_id in ids]
        return [self._abort(request) for request in requests if request is not None and not request.is_finished]

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run before a commit or an arrival."""
        self._state.begin_step()
        step = SchedulePass(self.config, self._policies, self._state, self._drafter)
        step.make_room()
        self._policies.batch.fill(step)
        step.add_drafts()
        step.explain_waiting()
        orders = None if self.transfers is None else self.transfers.take_orders()
        if step.is_empty and orders is None:
            return None
        states = None if self._state.states is None else self._state.states.take_orders()
        plan = step.builder.build(orders, *self.encoder.take_orders(), states)
        self._state.launch(plan, tuple(step.builder.requests))
        return plan

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in the outcome of the oldest launched step.

        Returns:
            The outputs that the step brought its requests.
        """
        step = self._state.in_flight.popleft()
        plan = step.plan
        assert plan.step == result.step, f"committing step {result.step}, expected {plan.step}"
        # Rejected drafts, and the token of a row that is sampled again: computed in vain.
        num_void = np.maximum(plan.num_samples - np.diff(result.token_starts), 0)
        ends = plan.num_computed + plan.num_scheduled - num_void
        fills_page = ends // self.kv.page_size > plan.num_computed // self.kv.page_size
        token_ids, starts = result.token_ids.tolist(), result.token_starts.tolist()
        columns = zip(
            step.requests,
            starts[:-1],
            starts[1:],
            plan.num_samples.tolist(),
            num_void.tolist(),
            ends.tolist(),
            fills_page.tolist(),
            strict=True,
        )
        has_windows = self.kv.windows is not None
        has_extras = bool(result.logprobs or result.prompt_logprobs or result.embeddings or result.proposals)
        outputs = []
        for index, (request, start, stop, num_samples, num_rejected, end, has_full_page) in enumerate(columns):
            request.num_inflight_steps -= 1
            if num_samples > 1:
                self._observe_drafts(request, num_samples - 1, max(0, stop - start - 1))
            was_running = request.is_running
            # One that ended, or paused and perhaps got new input, has no use for what was launched before that.
            if (was_running or request.awaits_step) and not request.mask_missed:
                # What the model made of a request that fails may be no numbers: nobody else may find it.
                fills = has_full_page and index not in result.failures
                if fills:
                    self.kv.cache_full_pages(request, min(end, request.num_tokens), plan.step)
                    self._state.keep_state(request, plan.step)
                if has_extras and index in result.prompt_logprobs:
                    report = result.prompt_logprobs[index]
                    outputs.append(prompt_report(request, int(plan.num_computed[index]), report))
                if start < stop:
                    queue = self._state.running if was_running else self._state.waiting
                    output = self._take_tokens(request, token_ids[start:stop], num_rejected, queue)
                    if fills and num_samples > 1:
                        self.kv.cache_full_pages(request, min(end, request.num_tokens - 1), plan.step)
                    if has_extras:
                        add_extras(output, index, result)
                        request.proposal = result.proposals.get(index)
                    outputs.append(output)
                elif index in result.failures:
                    outputs.append(self._fail(request, result.failures[index]))
                elif num_samples:
                    request.resample()
                    self._state.go_back(request)
            if has_windows and (has_full_page or num_rejected or not request.is_running):
                self._state.keep_window(request, end)
            request.mask_missed = request.mask_missed and request.num_inflight_steps > 0
            if not request.is_running:
                self._state.settle(request)
        self._state.end_step(plan.step)
        return outputs

    def fail_in_flight(self, error: str) -> list[TokenOutput]:
        """End the requests of all launched steps: one of these raised, and the later ones build on it.

        Their pages were never committed, so nothing that the failed steps wrote can be matched. A session whose turn
        had ended before lives on without its row: the runner never heard what a failed step was to tell of it.

        Returns:
            The terminal output of each request that was alive.
        """
        outputs = []
        while self._state.in_flight:
            step = self._state.in_flight.popleft()
            self._state.end_step(step.plan.step)
            for request in step.requests:
                request.num_inflight_steps -= 1
                if request.awaits_step:
                    self._state.end(request, FinishReason.ERROR)
                    outputs.append(TokenOutput(request.id, [], FinishReason.ERROR, error=error))
                elif request.is_finished:
                    self._state.retire(request)
                elif not request.num_inflight_steps:
                    self._state.take_back(request)
        return outputs

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forget all cached prefixes, as after a change of weights.

        Args:
            preempt_running: send running requests back to the queue first, to be recomputed, paused sessions too.

        Returns:
            False if requests hold pages (or a launched step still uses them); nothing is forgotten then.
        """
        if preempt_running:
            for request in list(self._state.running):
                self._state.preempt(request)
            while self._state.preempt_idle():
                pass
        if self.transfers is not None:
            self.transfers.drop_saves(self.step)
        return self.kv.clear_cache()

    def explain(self, request_id: str) -> str:
        """Return why a request was not scheduled in the last step; "" if it was.

        Raises:
            KeyError: no such request is alive.
        """
        return wait_reason(self._state.requests[request_id], self._state.waiting)

    def check_invariants(self) -> None:
        """Check every invariant of the scheduler's state, for tests."""
        self._state.check_invariants()

    def _check_size(self, num_tokens: int) -> None:
        """Raise InvalidRequest for a request that could never run to `num_tokens` tokens."""
        self.kv.check_size(num_tokens)
        budget = self.config.max_num_batched_tokens
        # The last token is never run; all others may have to be run at once after a preemption.
        if not self.config.enable_chunked_prefill and num_tokens - 1 > budget:
            raise InvalidRequest(f"{num_tokens} tokens need {num_tokens - 1} in a step without chunks; {budget} fit")

    def _abort(self, request: Request) -> TokenOutput:
        self._state.end(request, FinishReason.ABORT)
        return TokenOutput(request.id, [], FinishReason.ABORT)

    def _fail(self, request: Request, failure: RowFailure) -> TokenOutput:
        self._state.queue_of(request).remove(request)
        request.finish(FinishReason.ERROR)
        self._state.num_corrupted += failure.status >= 500
        return TokenOutput(request.id, [], FinishReason.ERROR, error=failure.error, error_status=failure.status)

    def _observe_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count a committed step's drafts of a request, and tell the drafter."""
        request.has_drafts = False
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.draft_counts.add(num_drafts, num_accepted)
        if self._drafter is not None:
            self._drafter.observe(request, num_drafts, num_accepted)

    def _take_tokens(
        self, request: Request, token_ids: list[int], num_rejected: int, queue: RequestQueue
    ) -> TokenOutput:
        """Take in a step's tokens of a request. If they end it, or its turn, remove it from its queue."""
        token_ids = request.append_outputs(token_ids, num_rejected)
        if request.finish_reason is not None:
            queue.remove(request)
            self._sessions.end_turn(request)
        return TokenOutput(request.id, token_ids, request.finish_reason, request.stop_reason, request.num_cached_tokens)
