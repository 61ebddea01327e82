"""`Engine`: scheduler and runner in one loop. The same object runs in the engine process and inside `LLM`.

    schedule -> launch -> commit, with up to `depth` steps launched: 1 is no overlap, 2 hides the scheduler behind
    the step that runs.

Knows no sockets and no text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill.engine.events import Aborted, Added, CacheReset, Extended, Paused, Woken
from tokenmill.engine.meter import Meter
from tokenmill.engine.step_log import StepLog, StepRecord
from tokenmill.engine.watchdog import Watchdog
from tokenmill.errors import InvalidRequest
from tokenmill.kv.events import KVEvent
from tokenmill.messages import AddRequest, EngineStats, TokenOutput
from tokenmill.request import FinishReason, Request, RequestStatus
from tokenmill.runner.pending_step import LaunchedStep
from tokenmill.sampling_params import SamplingParams
from tokenmill.scheduler.plan import StepPlan, StepResult
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.structured.store import GrammarStore

logger = logging.getLogger(__name__)

# How long a turn of the loop waits for a grammar when there is nothing else to do, in seconds.
GRAMMAR_WAIT = 0.005


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model and the KV cache allow a request.

    Attributes:
        max_model_len: prompt and output tokens together.
        eos_token_ids: ids that end a text, unless `ignore_eos`.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class Runner(Protocol):
    """Executes plans; `ModelRunner` on a real device."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; steps run in the order of their launch."""

    def recover(self) -> None:
        """After a failure, run plans again. Until then all are refused: their differences build on one that is lost."""

    def close(self) -> None:
        """Wait for launched steps."""


class Engine:
    """Accepts requests at any time and answers each with exactly one terminal output.

    Attributes:
        is_idle: the last `step` found nothing to do, though `has_work` may be true: what waits, waits for something
            from outside.
        is_paused: no step is launched; those that run are committed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: ModelLimits,
        depth: int = 1,
        log: StepLog | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        """Without `grammars` requests with one are run as they are: replays, and tests of the scheduler."""
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self.is_idle = True
        self.is_paused = False
        self._depth = depth
        self._log = log or StepLog()
        self._grammars = grammars
        self._watchdog = Watchdog()
        self._running_steps: deque[LaunchedStep] = deque()
        self._meter = Meter()
        self._num_arrived = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do."""
        return self.scheduler.has_work

    def add(self, message: AddRequest, status: RequestStatus = RequestStatus.WAITING) -> list[TokenOutput]:
        """Take in a request.

        Args:
            status: WAITING, or what it waits for besides its turn, until `wake`.

        Returns:
            Nothing, or the terminal error output of a request that can never run.
        """
        room = self.limits.max_model_len - len(message.prompt_token_ids)
        if not message.prompt_token_ids or room < 1:
            error = f"the prompt has {len(message.prompt_token_ids)} tokens; 1 to {self.limits.max_model_len - 1} fit"
            return [TokenOutput(message.id, [], FinishReason.ERROR, error=error)]
        params = message.params
        try:
            if not self._has_grammar(message):
                status = RequestStatus.WAITING_FOR_GRAMMAR
        except InvalidRequest as refusal:
            return [_refused(message.id, refusal)]
        self._log.note(Added(message, status.value))
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        request = Request(
            message.id,
            message.prompt_token_ids,
            params,
            arrival=self._num_arrived,
            max_tokens_total=len(message.prompt_token_ids) + min(room, params.max_tokens or room),
            stop_token_ids=stop_ids,
            priority=message.priority,
            cache_salt=message.cache_salt,
            group=message.group,
            is_resumable=message.is_resumable,
            pooling=message.pooling,
            status=status,
        )
        self._num_arrived += 1
        self._prompt_tokens += request.num_prompt_tokens
        self.scheduler.add(request)
        return []

    def extend(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, is_last: bool = False) -> None:
        """Continue a paused session with further input.

        Args:
            is_last: the session ends with this turn.

        Raises:
            InvalidRequest: no such session, it has not ended its turn, or the context has no room for the input.
        """
        request = self.scheduler.books.requests.get(request_id)
        if request is None or not request.is_paused:
            raise InvalidRequest("the session has ended, or its last turn has not")
        length = request.num_tokens - 1 + len(token_ids)
        room = self.limits.max_model_len - length
        if not token_ids or room < 1:
            raise InvalidRequest(f"{length} tokens with this input; the context holds {self.limits.max_model_len}")
        self._log.note(Extended(request_id, list(token_ids), params, is_last))
        request.is_resumable = not is_last
        self._prompt_tokens += len(token_ids)
        self.scheduler.extend(request_id, token_ids, params, length + min(room, params.max_tokens or room))

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests at once; unknown ids are ignored."""
        ids = list(ids)
        self._log.note(Aborted(ids))
        self._release_grammars(ids)
        outputs = self.scheduler.abort(ids)
        self._meter.ended(outputs)
        return outputs

    def wake(self, request_id: str) -> None:
        """What a request waited for besides its turn is there; unknown ids are ignored."""
        self._log.note(Woken(request_id))
        self.scheduler.wake(request_id)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget cached prefixes; see `Scheduler.reset_prefix_cache`."""
        self._log.note(CacheReset(preempt_running))
        return self.scheduler.reset_prefix_cache(preempt_running)

    def set_paused(self, is_paused: bool) -> None:
        """Launch no further step, or go on. Requests keep what they have, and may be added and aborted meanwhile."""
        self._log.note(Paused(is_paused))
        self.is_paused = is_paused

    def step(self) -> list[TokenOutput]:
        """Launch what can be launched; commit the oldest step when `depth` steps run or nothing else can be done.

        A step that raises ends the requests that are in it, and no others.
        """
        refusals = self._collect_grammars()
        started = time.perf_counter()
        plan = None if self.is_paused else self.scheduler.schedule()
        if plan is not None:
            self._meter.launched(plan)
        scheduled = time.perf_counter()
        result, error = self._launch_and_wait(plan)
        done = time.perf_counter()
        outputs = self.scheduler.fail_launched(error) if error else self.scheduler.commit(result) if result else []
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        seconds = (scheduled - started, done - scheduled, time.perf_counter() - done)
        self._log.add(plan, result, StepRecord(error=error, waiting=self.scheduler.first_wait_reason, seconds=seconds))
        self.is_idle = plan is None and result is None and error is None
        if self._is_stuck:
            self._watchdog.report(self._log)
        if not self.is_idle:
            self._meter.turned(seconds)
        ended = [output for output in outputs if output.finish_reason is not None]
        self._meter.ended(ended)
        self._release_grammars(output.id for output in ended)
        if self._grammars is not None and self._grammars.is_compiling and self.is_idle:
            self._grammars.wait(GRAMMAR_WAIT)
            self.is_idle = False
        return refusals + outputs

    def _has_grammar(self, message: AddRequest) -> bool:
        """True if the grammar that a request needs, if it needs one, is there. Raises InvalidRequest: it cannot be."""
        grammar = message.params.grammar
        if self._grammars is None or grammar is None:
            return True
        return self._grammars.admit(message.id, grammar.text)

    def _collect_grammars(self) -> list[TokenOutput]:
        """Let requests go on whose grammar has been compiled; the terminal outputs of those whose grammar cannot be."""
        if self._grammars is None or not self._grammars.is_compiling:
            return []
        collected = self._grammars.collect()
        for request_id in collected.ready:
            self.wake(request_id)
        for request_id, _ in collected.refused:
            self.abort([request_id])
        return [_refused(request_id, error) for request_id, error in collected.refused]

    def _release_grammars(self, ids: Iterable[str]) -> None:
        if self._grammars is not None:
            for request_id in ids:
                self._grammars.release(request_id)

    @property
    def _is_stuck(self) -> bool:
        return self.is_idle and not self.is_paused and self.scheduler.is_stuck

    def _launch_and_wait(self, plan: StepPlan | None) -> tuple[StepResult | None, str | None]:
        """The outcome of the step that is due, if one is, or why a step failed."""
        # The barrier between a request and the engine: whatever a step raises ends that step's requests only.
        try:
            if plan is not None:
                self._running_steps.append(self.runner.launch(plan))
            if not self._running_steps or (plan is not None and len(self._running_steps) < self._depth):
                return None, None
            return self._running_steps.popleft().result(), None
        except Exception as error:
            logger.exception("a step failed; its requests end with an error")
            while self._running_steps:
                # They build on the failed step: the runner refuses them, and their requests end with it.
                self._running_steps.popleft().exception()
            self.runner.recover()
            return None, f"the step of this request failed: {type(error).__name__}"

    def take_kv_events(self) -> list[KVEvent]:
        """What the prefix cache took in and gave up since the last call; empty unless events are on."""
        events = self.scheduler.kv.cache.events
        return [] if events is None else events.take()

    def stats(self) -> EngineStats:
        """Counters since start, and the state now."""
        kv = self.scheduler.kv
        return EngineStats(
            step=self.scheduler.step,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_queued=self.scheduler.num_queued,
            is_stuck=self._is_stuck,
            waiting_by_reason=self.scheduler.waiting_by_reason(),
            step_tokens=self._meter.step_tokens,
            step_seconds=self._meter.step_seconds,
            num_rows_used=self.scheduler.books.rows.num_rows - self.scheduler.books.rows.num_free,
            num_pages=kv.pool.num_usable,
            num_pages_pinned=kv.num_pinned,
            num_pages_evictable=kv.cache.num_evictable,
            num_preemptions=self.scheduler.books.num_preemptions,
            prefix_queries=kv.num_queried_tokens,
            prefix_hits=kv.num_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def close(self) -> None:
        """Wait for launched steps, let the runner's thread go and finish the log."""
        self.runner.close()
        if self._grammars is not None:
            self._grammars.close()
        self._log.close()


def _refused(request_id: str, error: InvalidRequest) -> TokenOutput:
    return TokenOutput(request_id, [], FinishReason.ERROR, error=str(error), error_status=error.status)
