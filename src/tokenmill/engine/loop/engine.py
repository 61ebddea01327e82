"""`Engine`: scheduler and executor in one loop. The same object runs in the engine process and inside `LLM`.

    schedule -> launch -> commit, with up to `depth` steps launched: 1 is no overlap, 2 hides the scheduler behind
    the step that runs.

Everything that a request waits for besides its turn is behind gates; everything that watches the steps is behind an
observer. Knows no sockets and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tokenmill.core.adapters import digest_of
from tokenmill.core.engine_messages import EngineStats
from tokenmill.core.errors import InvalidRequest, Refusal
from tokenmill.core.media import without_pixels
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import CacheKey, FinishReason, Request, RequestStatus, TurnInput
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import KVNews
from tokenmill.engine.kv.events import KVEvent
from tokenmill.engine.loop.gates import Gate, Gates
from tokenmill.engine.loop.observer import Observer
from tokenmill.engine.loop.step_log import Aborted, Added, CacheReset, Extended, Paused, Turn, Woken
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from tokenmill.engine.transfer.desk import TransferDesk
    from tokenmill.model.adapters.cache import AdapterCache

logger = logging.getLogger(__name__)

# How long a turn of the loop waits at a gate when there is nothing else to do, in seconds.
GATE_WAIT = 0.005


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that the model and the KV cache set for a request.

    Attributes:
        max_model_len: prompt and output tokens together.
        eos_token_ids: ids that end a text, unless `ignore_eos`.
        fingerprint: of the model whose KV it is; see `CacheKey`.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str = ""


class Engine:
    """Accepts requests at any time and answers each with exactly one terminal output.

    Attributes:
        is_idle: the last `step` found nothing to do, though `has_work` may be true: waiting requests need something
            from outside.
        is_paused: no step is launched; those that run are committed.
        adapters: the store of adapters; None: it has none.
        num_arrived: requests so far; draws of those that bring no seed are keyed by it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: ModelLimits,
        depth: int = 1,
        observer: Observer | None = None,
        gates: Sequence[Gate] = (),
        desk: TransferDesk | None = None,
    ) -> None:
        """
        Args:
            depth: steps that may be launched before the first of them is committed.
            gates: conditions that requests may wait for besides their turn. A replay has none: its inputs are recorded.
            desk: the sources of KV, where there are any; a replay has none either.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self.is_idle = True
        self.is_paused = False
        self._depth = depth
        self._observer = observer or Observer()
        self._gates = Gates(gates)
        self._desk = desk
        self.adapters: AdapterCache | None = None
        self.num_arrived = 0

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do, if only to wait for events from outside."""
        return self.scheduler.has_work or (self._desk is not None and self._desk.has_waiting)

    def add(self, message: AddRequest, status: RequestStatus = RequestStatus.WAITING) -> list[TokenOutput]:
        """Take in a request.

        Args:
            status: WAITING, or the status in which it waits until `wake` if no gate keeps it.

        Returns:
            Nothing, or the terminal error output of a request that can never run.
        """
        if message.id in self.scheduler.requests:
            # Whatever was answered under this id would be taken for the other's.
            logger.error("a second request came under the id %s and was dropped", message.id)
            return []
        if message.adapter is not None and not self.scheduler.config.max_loras:
            return [_refused(message.id, InvalidRequest("adapters need an engine started with --enable-lora", "model"))]
        most = self.limits.max_model_len + message.needs_no_output
        room = most - len(message.prompt_token_ids)
        if not message.prompt_token_ids or room < 1:
            error = f"the prompt has {len(message.prompt_token_ids)} tokens; 1 to {most - 1} fit"
            return [TokenOutput(message.id, [], FinishReason.ERROR, error=error)]
        params = message.params
        try:
            status = self._gates.admit(message) or status
            if self._desk is not None:
                self._desk.arrived(message)
            request = self._request(message, min(room, params.max_tokens or room), status)
            request.resume(message.output_token_ids)
            self.scheduler.add(request)
        except InvalidRequest as refusal:
            self._release([message.id])
            return [_refused(message.id, refusal)]
        if message.media:
            message = msgspec.structs.replace(message, media=without_pixels(message.media))
        self._observer.record(Added(message, status.value))
        self.num_arrived += 1
        return []

    def _request(self, message: AddRequest, max_tokens: int, status: RequestStatus) -> Request:
        stop_ids = frozenset(message.params.stop_token_ids)
        if not message.params.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        return Request(
            message.id,
            message.prompt_token_ids,
            message.params,
            arrival=self.num_arrived,
            max_tokens_total=len(message.prompt_token_ids) + max_tokens,
            stop_token_ids=stop_ids,
            priority=message.priority,
            cache_key=CacheKey(self.limits.fingerprint, message.cache_salt, digest_of(message.adapter)),
            adapter_name="" if message.adapter is None else message.adapter.name,
            tenant=message.tenant,
            is_resumable=message.is_resumable,
            pooling=message.pooling,
            is_background=message.is_background,
            media=tuple(one.span for one in message.media),
            status=status,
        )

    def extend(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, is_last: bool = False) -> None:
        """Continue a session with further input, at once or, while a turn runs, when that turn ends.

        Input that no longer fits when its turn comes ends the session with an error.

        Args:
            is_last: the session ends with this turn.

        Raises:
            InvalidRequest: see `Scheduler.extend`.
        """
        token_ids = list(token_ids)
        self.scheduler.extend(request_id, TurnInput(token_ids, params, is_last, self.limits.max_model_len))
        self._observer.record(Extended(request_id, token_ids, params, is_last))

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests at once; unknown ids are ignored."""
        ids = list(ids)
        if self._desk is not None:
            # No source may write to pages that are about to be somebody else's.
            self.take_news(self._desk.cancel_loads(ids))
        self._observer.record(Aborted(ids))
        outputs = self.scheduler.abort(ids)
        self._release(ids)
        self._observer.ended(outputs)
        return outputs

    def wake(self, request_id: str) -> None:
        """Let a request go on whose grammar, remote KV or the like is there now; ignore unknown ids."""
        self._observer.record(Woken(request_id))
        self.scheduler.wake(request_id)

    def reset_prefix_cache(self, preempt_running: bool = False, reset_external: bool = False) -> bool:
        """Forget cached prefixes; see `Scheduler.reset_prefix_cache`.

        Args:
            reset_external: forget what sources of KV have stored, too; else prompts find it there as after a restart.
        """
        if self._desk is not None:
            self.take_news(self._desk.reset(everything=preempt_running))
        self._observer.record(CacheReset(preempt_running))
        is_reset = self.scheduler.reset_prefix_cache(preempt_running)
        if is_reset and reset_external and self._desk is not None:
            self._desk.forget_stored()
        return is_reset

    def take_news(self, news: Iterable[KVNews]) -> None:
        """Take in news from sources of KV."""
        for one in news:
            self._observer.record(one)
            self.scheduler.take_news(one)

    def set_paused(self, is_paused: bool) -> None:
        """Stop launching steps, or go on. Requests keep what they hold, and may be added and aborted meanwhile."""
        self._observer.record(Paused(is_paused))
        self.is_paused = is_paused

    def step(self) -> list[TokenOutput]:
        """Launch what can be launched; commit the oldest step when `depth` steps run or nothing else can be done.

        A step that raises ends the requests that are in it, and no others.

        Raises:
            EngineFailed: the step has broken the device.
        """
        outputs = self._pass_gates() + self._hear_sources() + self.scheduler.begin_turns()
        self._ask_sources()
        self._observer.begin()
        plan = None if self.is_paused else self.scheduler.schedule()
        self._observer.scheduled(plan, self.scheduler.take_preempted())
        result, error = self._launch_and_wait(plan)
        self._observer.ran(result, error)
        brought = self.scheduler.fail_in_flight(error) if error else self.scheduler.commit(result) if result else []
        self.is_idle = plan is None and result is None and error is None
        goes_on = self.has_work and not self.is_idle
        self._observer.committed(brought, self.scheduler.first_wait_reason, self._is_stuck, goes_on)
        outputs += brought
        if self._desk is not None:
            self._desk.ended(brought)
        self._release([output.id for output in outputs if output.finish_reason is not None])
        if self.is_idle and self._gates.has_waiting:
            outputs += self._pass_gates(GATE_WAIT)
            self.is_idle = False
        if self.is_idle and self._desk is not None and self._desk.has_waiting and self.scheduler.has_work:
            self._desk.wait(GATE_WAIT)
            self.is_idle = False
        return outputs

    def _hear_sources(self) -> list[TokenOutput]:
        """Take in what sources of KV have done; return the terminal outputs of requests whose KV failed to come."""
        if self._desk is None:
            return []
        self.take_news(self._desk.collect())
        outputs = []
        for request_id, why in self._desk.take_failed():
            if self.abort([request_id]):
                outputs.append(TokenOutput(request_id, [], FinishReason.ERROR, error=why))
        return outputs

    def _ask_sources(self) -> None:
        """Ask the sources of KV about the prompts whose turn may come; a replay has recorded their answers."""
        queries = self.scheduler.take_queries()
        if self._desk is not None:
            self.take_news(self._desk.ask(queries))

    def _pass_gates(self, timeout: float = 0.0) -> list[TokenOutput]:
        """Let requests go on whose gates have opened; return the terminal outputs of refused ones."""
        outputs = []
        for request_id, news in self._gates.collect(timeout):
            if isinstance(news, Refusal):
                self.abort([request_id])
                outputs.append(_refused(request_id, news))
            elif news is RequestStatus.WAITING:
                self.wake(request_id)
            else:
                self.scheduler.requests[request_id].move_to(news)
        return outputs

    def _release(self, ended: Iterable[str]) -> None:
        ended = list(ended)
        if self._desk is not None:
            self._desk.forget(ended)
        self._gates.release(ended, self.scheduler.requests)

    @property
    def _is_stuck(self) -> bool:
        return self.is_idle and not self.is_paused and self.scheduler.is_stuck

    def _launch_and_wait(self, plan: StepPlan | None) -> tuple[StepResult | None, str | None]:
        """Launch the plan and return the outcome of the step that is due, if any, or why a step failed."""
        # The barrier between a request and the engine: whatever a step raises ends that step's requests only.
        in_flight = self.scheduler.in_flight
        try:
            if plan is not None:
                in_flight[-1].outcome = self.executor.launch(plan)
            if not in_flight or (plan is not None and len(in_flight) < self._depth):
                return None, None
            return in_flight[0].result(), None
        except Exception as error:
            logger.exception("a step failed; its requests end with an error")
            # Those behind it build on the failed step: they are refused, and their requests end with it.
            self.executor.recover()
            return None, f"the step of this request failed: {type(error).__name__}"

    def take_kv_events(self) -> list[KVEvent]:
        """Return what the prefix cache stored and evicted since the last call; empty unless events are on."""
        events = self.scheduler.kv.cache.events
        return [] if events is None else events.take()

    def turns(self) -> list[Turn]:
        """Return the last thousand turns, oldest first."""
        return self._observer.turns()

    def stats(self) -> EngineStats:
        """Return counters since start, and the state now."""
        drafts = self.scheduler.draft_counts
        return EngineStats(
            step=self.scheduler.step,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_queued=self.scheduler.num_queued,
            is_stuck=self._is_stuck,
            waiting_by_reason=self.scheduler.waiting_by_reason(),
            step_tokens=self._observer.stats.step_tokens,
            step_seconds=self._observer.stats.step_seconds,
            num_rows_used=self.scheduler.num_rows_used,
            num_preemptions=self.scheduler.num_preemptions,
            num_corrupted=self.scheduler.num_corrupted,
            prompt_tokens=self._observer.stats.prompt_tokens,
            generation_tokens=self._observer.stats.generation_tokens,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=sum(drafts.accepted_per_position),
            num_accepted_per_position=list(drafts.accepted_per_position),
            running_adapters=self._adapters_of(is_running=True),
            waiting_adapters=self._adapters_of(is_running=False),
            **self.scheduler.counts(),
        )

    def _adapters_of(self, is_running: bool) -> list[str]:
        """Return the names of the adapters of running requests, or of waiting ones."""
        if self.adapters is None:
            return []
        requests = [request for request in self.scheduler.requests.values() if request.cache_key.adapter]
        names = [self.adapters.name_of(request.id) for request in requests if request.is_running == is_running]
        return sorted({name for name in names if name is not None})

    def close(self) -> None:
        """Wait for launched steps, close the executor and finish the log."""
        self.executor.close()
        if self._desk is not None:
            self._desk.close()
        self._gates.close()
        self._observer.close()


def _refused(request_id: str, error: Refusal) -> TokenOutput:
    return TokenOutput(request_id, [], FinishReason.ERROR, error=str(error), error_status=error.status)
