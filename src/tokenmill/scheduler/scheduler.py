"""The scheduler: `schedule()` makes a plan, `commit()` takes in its outcome.

Several steps may be launched before the first is committed (overlap). Knows no torch, no sockets and no clock: the
same calls give the same plans, so a schedule can be recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenmill.kv.kv_manager import KVManager
from tokenmill.messages import TokenLogprobs, TokenOutput
from tokenmill.request import FinishReason, Request, RequestStatus
from tokenmill.sampling_params import SamplingParams
from tokenmill.scheduler.batch_policy import BATCH_POLICIES
from tokenmill.scheduler.books import Books, LaunchedStep, is_ready
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.plan import StepPlan, StepResult
from tokenmill.scheduler.queue import POLICIES
from tokenmill.scheduler.step_pass import StepPass

# What a waiting request may wait for; the status says all but the first two.
WAIT_REASON_OF = {RequestStatus.WAITING_FOR_GRAMMAR: "grammar", RequestStatus.WAITING_FOR_REMOTE_KV: "remote_kv"}
WAIT_REASONS = ("capacity", "group", *WAIT_REASON_OF.values())


class Scheduler:
    """All requests between their arrival and their last output."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.books = Books(config.max_num_seqs, POLICIES[config.policy], kv)
        self._fill_step = BATCH_POLICIES[config.batch_policy]

    @property
    def step(self) -> int:
        """Number of the newest launched step."""
        return self.books.step

    @property
    def num_running(self) -> int:
        """Requests that own a row and make progress."""
        return len(self.books.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, pages, budget or something else."""
        return len(self.books.waiting)

    @property
    def num_queued(self) -> int:
        """Waiting requests that nothing but rows, pages or budget keeps from running."""
        return sum(is_ready(request) and not self.books.awaits_group(request) for request in self.books.waiting)

    def waiting_by_reason(self) -> dict[str, int]:
        """How many requests wait, by what for: `capacity` are rows, pages or budget."""
        counts = dict.fromkeys(WAIT_REASONS, 0)
        for request in self.books.waiting:
            reason = WAIT_REASON_OF.get(request.status, "capacity")
            counts["group" if reason == "capacity" and self.books.awaits_group(request) else reason] += 1
        return counts

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or a launched step is not committed. Paused sessions are no work."""
        return bool(self.books.waiting or self.books.running or self.books.launched)

    @property
    def first_wait_reason(self) -> str:
        """Why the first of the waiting requests waits; "" if none waits."""
        return self.books.waiting.first().wait_reason if self.books.waiting else ""

    @property
    def is_stuck(self) -> bool:
        """True if a request could go on, nothing is launched whose commit could change that, and nothing runs.

        Meaningful after a `schedule()` that returned None. It would be a bug: liveness is an invariant.
        """
        if self.books.launched:
            return False
        return bool(self.books.running) or any(is_ready(request) for request in self.books.waiting)

    def add(self, request: Request) -> None:
        """Take in a request; it waits for its turn."""
        assert self.kv.num_pages_for(request.max_tokens_total) <= self.kv.pool.num_usable, "refused at the edge"
        self.books.enter(request)

    def wake(self, request_id: str) -> None:
        """What a request waited for besides its turn is there: its grammar, its remote KV. Unknown ids are ignored."""
        request = self.books.requests.get(request_id)
        if request is not None and not request.is_finished:
            request.move_to(RequestStatus.WAITING)

    def extend(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, max_tokens_total: int) -> None:
        """Continue a paused session with further input.

        Raises:
            KeyError: no such session.
        """
        request = self.books.requests[request_id]
        request.extend(token_ids, params, max_tokens_total)
        self.books.waiting.add(request)

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests wherever they are. Unknown and finished ones are ignored: they may have just ended.

        Returns:
            The terminal output of each that was alive.
        """
        requests = [self.books.requests.get(request_id) for request_id in ids]
        return [self._abort(request) for request in requests if request is not None and not request.is_finished]

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if nothing can run before a launched step is committed or something arrives."""
        step = StepPass(self.config, self.books)
        self._fill_step(step)
        step.explain_waiting()
        if step.is_empty:
            return None
        plan = step.builder.build()
        self.books.step = plan.step
        self.books.launched.append(LaunchedStep(plan, tuple(step.builder.requests)))
        return plan

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in the outcome of the oldest launched step.

        Returns:
            What the step brought each request that was waiting for a token.
        """
        launched = self.books.launched.popleft()
        plan = launched.plan
        assert plan.step == result.step, f"committing step {result.step}, expected {plan.step}"
        ends = plan.num_computed + plan.num_scheduled
        fills_page = ends // self.kv.page_size > plan.num_computed // self.kv.page_size
        goes_without = plan.samples & (result.token_ids < 0)
        # A token that is run again must not be in a page that others share.
        columns = zip(
            launched.requests,
            (ends - goes_without).tolist(),
            fills_page.tolist(),
            result.token_ids.tolist(),
            strict=True,
        )
        outputs = []
        for index, (request, end, has_full_page, token_id) in enumerate(columns):
            request.num_inflight_steps -= 1
            # One that ended, or paused and perhaps got new input, has no use for what was launched before that.
            if request.awaits_step and not request.is_late:
                if has_full_page:
                    self.kv.cache_full_pages(request, end, plan.step)
                if index in result.prompt_logprobs:
                    report = result.prompt_logprobs[index]
                    outputs.append(_prompt_report(request, int(plan.num_computed[index]), report))
                if token_id >= 0:
                    outputs.append(self._take_token(request, token_id))
                    if index in result.logprobs:
                        outputs[-1].logprobs = [result.logprobs[index]]
                    if index in result.embeddings:
                        outputs[-1].embedding, outputs[-1].token_ids = result.embeddings[index], []
                elif index in result.failures:
                    outputs.append(self._fail(request, result.failures[index]))
                elif goes_without[index]:
                    request.go_without()
            request.is_late = request.is_late and request.num_inflight_steps > 0
            if not request.is_running:
                self.books.retire(request)
        return outputs

    def fail_launched(self, error: str) -> list[TokenOutput]:
        """End the requests of all launched steps: one of those steps raised, and the later ones build on it.

        Their pages were never committed, so nothing that the failed steps wrote can be matched.

        Returns:
            The terminal output of each request that was alive.
        """
        outputs = []
        while self.books.launched:
            for request in self.books.launched.popleft().requests:
                request.num_inflight_steps -= 1
                if request.awaits_step:
                    self.books.end(request, FinishReason.ERROR)
                    outputs.append(TokenOutput(request.id, [], FinishReason.ERROR, error=error))
                else:
                    self.books.retire(request)
        return outputs

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forget all cached prefixes, as after a change of weights.

        Args:
            preempt_running: send running requests back to the queue first, to be recomputed, paused sessions too.

        Returns:
            False if requests hold pages (or a launched step still uses them); nothing is forgotten then.
        """
        if preempt_running:
            while self.books.running:
                self.books.preempt_last()
            while self.books.preempt_idle():
                pass
        return self.kv.clear_cache()

    def num_common_prefix_pages(self) -> int:
        """Leading pages that all running requests share, for attention that reads them once (cascade attention)."""
        return self.kv.num_common_pages(list(self.books.running))

    def explain(self, request_id: str) -> str:
        """Why a request was not scheduled in the last step; "" if it was.

        Raises:
            KeyError: no such request is alive.
        """
        request = self.books.requests[request_id]
        if request.is_running:
            return request.wait_reason
        if request.is_paused:
            return "waits for the next input of its session"
        ahead = self.books.waiting.position(request)
        if request.wait_reason or not ahead:
            return request.wait_reason or "has just arrived"
        return f"{ahead} ahead of it; the first {self.books.waiting.first().wait_reason or 'has just arrived'}"

    def check_invariants(self) -> None:
        """See `Books.check_invariants`."""
        self.books.check_invariants()

    def _abort(self, request: Request) -> TokenOutput:
        self.books.end(request, FinishReason.ABORT)
        return TokenOutput(request.id, [], FinishReason.ABORT)

    def _fail(self, request: Request, error: str) -> TokenOutput:
        self.books.queue_of(request).remove(request)
        request.finish(FinishReason.ERROR)
        return TokenOutput(request.id, [], FinishReason.ERROR, error=error, error_status=400)

    def _take_token(self, request: Request, token_id: int) -> TokenOutput:
        queue = self.books.queue_of(request)
        request.num_pending_tokens -= 1
        request.append_output(token_id)
        if request.num_output_tokens == 1:
            self.books.note_first_token(request)
        if request.finish_reason is not None:
            queue.remove(request)
        return TokenOutput(
            request.id, [token_id], request.finish_reason, request.stop_reason, request.num_cached_tokens
        )


def _prompt_report(request: Request, num_computed: int, logprobs: list[TokenLogprobs]) -> TokenOutput:
    """Log probabilities of the prompt's tokens from `num_computed + 1` on, less those told before a preemption."""
    known = request.num_reported_tokens - num_computed
    request.num_reported_tokens = max(request.num_reported_tokens, num_computed + len(logprobs))
    return TokenOutput(request.id, [], prompt_logprobs=logprobs[max(0, known) :])
