"""`CommitPass`: take in the outcome of one launched step, request by request, in batch order."""

from __future__ import annotations

import numpy as np

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import RowFailure, StepResult
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.core.scheduling import InFlightStep
from tokenmill.engine.scheduler.drafter import DraftCounts
from tokenmill.engine.scheduler.reports import add_extras, prompt_report
from tokenmill.engine.scheduler.sessions import Sessions
from tokenmill.engine.scheduler.state import SchedulerState


class CommitPass:
    """Commits one step: tokens and other outputs to their requests, full pages to the prefix cache.

    Attributes:
        outputs: the outputs that the step has brought its requests so far.
    """

    def __init__(
        self,
        state: SchedulerState,
        sessions: Sessions,
        draft_counts: DraftCounts,
        step: InFlightStep,
        result: StepResult,
    ) -> None:
        assert step.plan.step == result.step, f"committing step {result.step}, expected {step.plan.step}"
        self.outputs: list[TokenOutput] = []
        self._state = state
        self._kv = state.kv
        self._sessions = sessions
        self._draft_counts = draft_counts
        self._step = step
        self._result = result
        self._has_extras = bool(result.logprobs or result.prompt_logprobs or result.embeddings or result.proposals)

    def run(self) -> list[TokenOutput]:
        """Commit the step, and return its outputs."""
        plan, result, page_size = self._step.plan, self._result, self._kv.page_size
        # Rejected drafts, and the token of a row that is sampled again: computed in vain.
        num_void = np.maximum(plan.num_samples - np.diff(result.token_starts), 0)
        ends = plan.num_computed + plan.num_scheduled - num_void
        fills_page = ends // page_size > plan.num_computed // page_size
        token_ids, starts = result.token_ids.tolist(), result.token_starts.tolist()
        columns = zip(
            self._step.requests,
            starts[:-1],
            starts[1:],
            plan.num_samples.tolist(),
            num_void.tolist(),
            ends.tolist(),
            fills_page.tolist(),
            strict=True,
        )
        committed = self._state.resources.committed
        for index, (request, start, stop, num_samples, num_rejected, end, has_full_page) in enumerate(columns):
            request.num_inflight_steps -= 1
            if num_samples > 1:
                self._observe_drafts(request, num_samples - 1, max(0, stop - start - 1))
            # A request that ended, or paused and perhaps got new input, has no use for what was launched before that.
            was_running = request.status is RequestStatus.RUNNING
            if (was_running or request.awaits_step) and not request.mask_missed:
                fills = has_full_page and index not in result.failures
                # The KV of a request that fails may hold numbers that are not finite: no other request may find it.
                if fills:
                    self._kv.cache_full_pages(request, min(end, request.num_tokens), plan.step)
                self._take_outcome(index, request, token_ids[start:stop], num_samples, num_rejected)
                if fills and num_samples > 1 and start < stop:
                    self._kv.cache_full_pages(request, min(end, request.num_tokens - 1), plan.step)
            is_running = request.status is RequestStatus.RUNNING
            if committed and (has_full_page or num_rejected or not is_running):
                for resource in committed:
                    resource.committed(request, end)
            if request.mask_missed:
                request.mask_missed = request.num_inflight_steps > 0
            if not is_running:
                self._state.settle(request)
        for resource in self._state.resources.end_step:
            resource.end_step(plan.step)
        return self.outputs

    def _observe_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the step's drafts of a request, and tell the drafter."""
        request.has_drafts = False
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self._draft_counts.add(num_drafts, num_accepted)
        for drafter in self._state.drafters:
            drafter.observe(request, num_drafts, num_accepted)

    def _report_prompt(self, index: int, request: Request) -> None:
        """Report the log probabilities of prompt tokens that the step ran."""
        logprobs = self._result.prompt_logprobs.get(index)
        if logprobs is not None:
            self.outputs.append(prompt_report(request, int(self._step.plan.num_computed[index]), logprobs))

    def _take_outcome(
        self, index: int, request: Request, token_ids: list[int], num_samples: int, num_rejected: int
    ) -> None:
        """Take in a step's tokens of a request. If they end it, or its turn, remove it from its queue."""
        if self._has_extras:
            self._report_prompt(index, request)
        if not token_ids:
            self._take_no_token(index, request, num_samples)
            return
        was_running = request.status is RequestStatus.RUNNING
        num_brought, token_ids = len(token_ids), request.append_outputs(token_ids, num_rejected)
        finish_reason = request.finish_reason
        if finish_reason is not None:
            queue = self._state.running if was_running else self._state.waiting
            queue.remove(request)
            self._sessions.end_turn(request, len(token_ids) < num_brought)
        output = TokenOutput(request.id, token_ids, finish_reason, request.stop_reason, request.num_cached_tokens)
        output.num_external_cached_tokens = request.num_external_cached_tokens
        if self._has_extras:
            add_extras(output, index, self._result)
            request.proposal = self._result.proposals.get(index)
        self.outputs.append(output)

    def _take_no_token(self, index: int, request: Request, num_samples: int) -> None:
        """End a request that has failed or has its vector, or prepare one to be sampled again."""
        if index in self._result.failures:
            self._fail(request, self._result.failures[index])
        elif index in self._result.embeddings:
            self._end_with_vector(index, request)
        elif num_samples:
            request.resample()
            self._state.rewind(request)

    def _end_with_vector(self, index: int, request: Request) -> None:
        self._state.queues.queue_of(request).remove(request)
        request.finish(FinishReason.LENGTH)
        output = TokenOutput(request.id, [], FinishReason.LENGTH, None, request.num_cached_tokens)
        add_extras(output, index, self._result)
        self.outputs.append(output)

    def _fail(self, request: Request, failure: RowFailure) -> None:
        self._state.queues.queue_of(request).remove(request)
        request.finish(FinishReason.ERROR)
        self._state.num_corrupted += failure.status >= 500
        output = TokenOutput(request.id, [], FinishReason.ERROR, error=failure.error, error_status=failure.status)
        self.outputs.append(output)
