"""`Engine`: scheduler and executor in one loop. The same object runs in the engine process and inside `LLM`.

    receive -> schedule -> launch -> commit -> publish, with up to `depth` steps launched: 1 is no overlap, 2 hides the
    scheduler behind the step that runs.

Capabilities take part as extensions: gates, where requests wait for something besides their turn, KV from elsewhere.
An observer watches the steps. Knows no sockets, no text and no code of a capability.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tokenmill.core.adapters import digest_of
from tokenmill.core.engine_messages import EngineReply, EngineStats
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.extension import EngineExtension
from tokenmill.core.hooks import hooks, overriding
from tokenmill.core.media import without_contents
from tokenmill.core.messages import AddRequest, EngineControl, TokenOutput
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.pooling import EMBEDS_ONLY
from tokenmill.core.request import CacheKey, FinishReason, Request, RequestStatus, TurnInput
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.scheduling import Feature, check_served
from tokenmill.core.transfers import TransferEvent
from tokenmill.engine.kv.events import KVEvent
from tokenmill.engine.loop.lifetimes import Lifetimes
from tokenmill.engine.loop.observer import Observer
from tokenmill.engine.loop.stats import engine_stats
from tokenmill.engine.loop.step_log import Aborted, Added, CacheReset, Extended, Iteration, Paused, Woken
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.scheduler.scheduler import EngineScheduler

logger = logging.getLogger(__name__)

# How long an iteration of the loop waits for an event when there is nothing else to do, in seconds.
EVENT_WAIT = 0.005

Extension = TypeVar("Extension", bound=EngineExtension)


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits that the model and the KV cache set for a request.

    Attributes:
        max_model_len: prompt and output tokens together.
        eos_token_ids: ids that end a text, unless `ignore_eos`.
        fingerprint: of the model whose KV it is; see `CacheKey`.
        generates: False: it gives vectors alone.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str = ""
    generates: bool = True


class Engine:
    """Accepts requests at any time and answers each with exactly one terminal output.

    Attributes:
        is_idle: the last `step` found nothing to do, though `has_work` may be true: waiting requests need something
            from outside.
        is_paused: no step is launched; those that run are committed.
        num_arrived: requests so far; draws of those that bring no seed are keyed by it.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        executor: Executor,
        limits: ModelLimits,
        depth: int = 1,
        observer: Observer | None = None,
        extensions: Sequence[EngineExtension] = (),
    ) -> None:
        """
        Args:
            depth: steps that may be launched before the first of them is committed.
            extensions: other parts of the loop. A replay has no gates and no sources: their events are recorded.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self.is_idle = True
        self.is_paused = False
        self._depth = depth
        self._observer = observer or Observer()
        self._extensions = tuple(extensions)
        self._arrived = hooks(extensions, EngineExtension.arrived)
        self._poll = hooks(extensions, EngineExtension.poll)
        self._before_schedule = hooks(extensions, EngineExtension.before_schedule)
        self._committed = hooks(extensions, EngineExtension.committed)
        self._released = hooks(extensions, EngineExtension.released)
        self._before_abort = hooks(extensions, EngineExtension.before_abort)
        self._before_reset = hooks(extensions, EngineExtension.before_reset)
        self._before_sleep = hooks(extensions, EngineExtension.before_sleep)
        self._sleep = hooks(extensions, EngineExtension.sleep)
        self._answer = hooks(extensions, EngineExtension.answer)
        self._waiting = overriding(extensions, EngineExtension.wait)
        self._unserved = frozenset(Feature) - scheduler.serves
        self.num_arrived = 0

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do, if only to wait for events from outside."""
        return self.scheduler.has_work or any(extension.has_waiting for extension in self._waiting)

    @property
    def requests(self) -> Mapping[str, Request]:
        """All live requests, by id."""
        return self.scheduler.requests

    def add(self, message: AddRequest, status: RequestStatus = RequestStatus.WAITING) -> list[TokenOutput]:
        """Take in a request.

        Args:
            status: WAITING, or the status in which it waits until `wake` if no gate keeps it.

        Returns:
            Nothing, or the terminal error output of a request that can never run.
        """
        if message.id in self.scheduler.requests:
            # An answer under this id would be taken for the first request's.
            logger.error("request id %s is in use already: the second request is dropped", message.id)
            return []
        if message.adapter is not None and not self.scheduler.config.max_loras:
            refusal = InvalidRequest("adapters need an engine started with --enable-lora", "model")
            return [TokenOutput.refusal(message.id, refusal)]
        if not self.limits.generates and not message.pooling:
            return [TokenOutput.refusal(message.id, InvalidRequest(EMBEDS_ONLY, "model"))]
        most = self.limits.max_model_len + message.needs_no_output
        room = most - len(message.prompt_token_ids)
        if not message.prompt_token_ids or room < 1:
            error = f"the prompt has {len(message.prompt_token_ids)} tokens; 1 to {most - 1} fit"
            return [TokenOutput(message.id, [], FinishReason.ERROR, error=error)]
        params = message.params
        try:
            check_served(message, self._unserved, type(self.scheduler))
            for arrived in self._arrived:
                status = arrived(message) or status
            request = self._request(message, min(room, params.max_tokens or room), status)
            request.resume(message.output_token_ids)
            self.scheduler.add(request)
        except InvalidRequest as refusal:
            self._release([message.id])
            return [TokenOutput.refusal(message.id, refusal)]
        if message.media:
            message = msgspec.structs.replace(message, media=without_contents(message.media))
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
        for before_abort in self._before_abort:
            before_abort(self, ids)
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
            reset_external: forget prefixes stored outside, too; else prompts find them there as after a restart.
        """
        for before_reset in self._before_reset:
            before_reset(self, preempt_running)
        self._observer.record(CacheReset(preempt_running))
        is_reset = self.scheduler.reset_prefix_cache(preempt_running)
        if is_reset and reset_external:
            for extension in self._extensions:
                extension.forget_stored()
        return is_reset

    def sleep(self) -> bool:
        """Give memory back to the machine until it is used again, prefixes that are not stored outside with it.

        Returns:
            False: requests are alive, or no extension can give memory back.
        """
        if self.requests or not self._sleep:
            return False
        for before_sleep in self._before_sleep:
            before_sleep(self)
        if not self.reset_prefix_cache():
            return False
        for sleep in self._sleep:
            sleep()
        return True

    def apply_transfer_events(self, events: Iterable[TransferEvent]) -> None:
        """Record events from sources of KV, and apply them."""
        for event in events:
            self._observer.record(event)
            self.scheduler.apply_transfer_event(event)

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
        outputs = self._receive()
        plan = self._schedule()
        outputs += self._commit(plan, *self._launch(plan))
        return self._publish(outputs)

    def _receive(self) -> list[TokenOutput]:
        """Take in outside events since the last iteration, and let paused sessions go on that have new input."""
        outputs = [output for poll in self._poll for output in poll(self)]
        outputs += self.scheduler.begin_turns()
        for before_schedule in self._before_schedule:
            before_schedule(self)
        return outputs

    def _schedule(self) -> StepPlan | None:
        """Plan the next step; None: nothing can run before a commit or an arrival."""
        self._observer.begin_iteration()
        plan = None if self.is_paused else self.scheduler.schedule()
        self._observer.scheduled(plan, self.scheduler.take_preempted())
        return plan

    def _launch(self, plan: StepPlan | None) -> tuple[StepResult | None, str | None]:
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

    def _commit(self, plan: StepPlan | None, result: StepResult | None, error: str | None) -> list[TokenOutput]:
        """Take in the outcome of the step that was due, if any; return what it has brought its requests."""
        self._observer.ran(result, error)
        outputs = self.scheduler.fail_in_flight(error) if error else self.scheduler.commit(result) if result else []
        self.is_idle = plan is None and result is None and error is None
        goes_on = self.has_work and not self.is_idle
        self._observer.committed(outputs, self.scheduler.first_wait_reason, self._is_stuck, goes_on)
        for committed in self._committed:
            committed(outputs)
        return outputs

    def _publish(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Let go of requests that have ended. If all that are left wait for events, give one a moment to happen."""
        self._release([output.id for output in outputs if output.finish_reason is not None])
        if self.is_idle and self.scheduler.has_work:
            waiting = next((extension for extension in self._waiting if extension.has_waiting), None)
            if waiting is not None:
                waiting.wait(EVENT_WAIT)
                self.is_idle = False
        return outputs

    def _release(self, ended: Sequence[str]) -> None:
        for released in self._released:
            released(ended, self.scheduler.requests)

    @property
    def _is_stuck(self) -> bool:
        return self.is_idle and not self.is_paused and self.scheduler.is_stuck

    def take_kv_events(self) -> list[KVEvent]:
        """Return what the prefix cache stored and evicted since the last call; empty unless events are on."""
        events = self.scheduler.kv.cache.events
        return [] if events is None else events.take_events()

    def iterations(self) -> list[Iteration]:
        """Return the last thousand iterations, oldest first."""
        return self._observer.iterations()

    @property
    def lifetimes(self) -> Lifetimes:
        """Times of requests."""
        return self._observer.lifetimes

    def stats(self) -> EngineStats:
        """Return counters since start, and the state now."""
        return engine_stats(self.scheduler, self._observer.stats, self._is_stuck)

    def answer(self, message: EngineControl) -> EngineReply | None:
        """Let an extension carry out an operator's message; return its reply. None: it is for none of them."""
        return next((reply for answer in self._answer if (reply := answer(message)) is not None), None)

    def extension(self, kind: type[Extension]) -> Extension | None:
        """Return the extension of a class; None: the engine does without."""
        return next((extension for extension in self._extensions if isinstance(extension, kind)), None)

    def close(self) -> None:
        """Wait for launched steps, close the executor and finish the log."""
        self.executor.close()
        for extension in reversed(self._extensions):
            extension.close()
        self._observer.close()
