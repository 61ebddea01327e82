"""`Trace`: one engine without a model, and random requests, aborts, failures and resets, with every answer checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.core.request import FinishReason, RequestStatus
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.scheduling import Feature
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import RESERVED_PAGES, PagePool
from tokenmill.engine.kv.radix_tree import NullCache, RadixTree
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.observer import Observer, Watchdog
from tokenmill.engine.loop.step_log import StepLog, plain_plan
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.engine.scheduler.standard import standard_resources
from tokenmill.lab.conformance.memory_runner import VOCAB_SIZE, PagedMemoryRunner, expected_output
from tokenmill.lab.conformance.plan_checks import PlanChecks, SchedulerFault, demand

# Steps of the oldest request between two looks; see `SchedulerConfig.patience`.
PATIENCE = 8
LONGEST = 32


def turns_of_an_elder(config: SchedulerConfig, max_model_len: int, depth: int) -> int:
    """Return a bound on the steps of a request's turn as the elder, with those until it is that.

    It is looked for twice; running requests end, since none enters before it; then it runs, and comes first.
    """
    longest = -(-max_model_len // config.largest_chunk) + max_model_len
    return 2 * config.patience + depth * (config.max_num_seqs + 2) * longest


class CheckingRunner(PagedMemoryRunner):
    """Has each plan checked before it runs, and remembers a fault that the engine takes for the failure of a step."""

    checks: PlanChecks
    fault: AssertionError | None = None

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Check the plan, then run it."""
        try:
            self.checks.launched(plan)
            return super().launch(plan)
        except (AssertionError, LookupError) as error:
            self.fault = self.fault or AssertionError(f"step {plan.step}: {error}")
            raise


class Asleep(Watchdog):
    """Writes no file: a trace tells by itself where nothing runs."""

    def report(self, log: StepLog) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Sent:
    """A request that was sent, and what came back.

    Attributes:
        turns: of the loop so far, and at most.
        may_fail: a step was made to fail since it came.
    """

    prompt: list[int]
    max_tokens: int
    expected: list[int]
    most_turns: int
    turns: int = 0
    may_fail: bool = False
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Trace:
    """Drives an engine whose pages, rows and budget are few, so that everything runs short.

    Attributes:
        plans: all that were launched.
    """

    def __init__(self, kind: type[EngineScheduler], rng: random.Random, **fixed: Any) -> None:
        """
        Args:
            fixed: fields of `SchedulerConfig` that are not drawn.
        """
        self._rng = rng
        self._serves = kind.serves
        page_size, num_pages = rng.choice([1, 2, 4]), rng.randint(8, 20)
        drawn: dict[str, Any] = {
            "max_num_seqs": rng.randint(1, 5),
            "max_num_batched_tokens": rng.randint(5, 24),
            "long_prefill_token_threshold": rng.choice([0, 0, 3]),
            "patience": PATIENCE,
        }
        self._config = config = SchedulerConfig(**(drawn | fixed))
        self._depth = rng.choice([1, 2, 2, 3])
        self._limits = limits = ModelLimits(
            min(LONGEST, num_pages * page_size), VOCAB_SIZE, frozenset(rng.sample(range(VOCAB_SIZE), rng.randint(0, 4)))
        )
        cache = RadixTree(page_size) if rng.random() < 0.8 else NullCache(page_size)
        self._kv = KVManager(PagePool(num_pages + RESERVED_PAGES), cache, page_size)
        self._scheduler = kind(config, self._kv, standard_resources(config, self._kv, None, self._depth), ())
        self._runner = CheckingRunner(config.max_num_seqs, num_pages, page_size, limits.max_model_len)
        self._runner.checks = PlanChecks(self._scheduler, config, num_pages, page_size)
        self._engine = Engine(self._scheduler, self._runner, limits, self._depth, Observer(watchdog=Asleep()))
        self._sent: dict[str, Sent] = {}
        self._held: list[str] = []
        self._num_failed = 0

    @property
    def plans(self) -> list[dict[str, Any]]:
        """All launched plans, as plain data."""
        return [plain_plan(plan) for plan in self._runner.plans]

    def act(self) -> None:
        """Let something happen."""
        actions: list[Callable[[], object]] = [self.add, self.steps, self.abort, self.fail_step, self.reset]
        weights = [6, 12, 3, 2, 3]
        if Feature.GRAMMARS in self._serves:
            actions.append(self.wake)
            weights.append(2)
        self._rng.choices(actions, weights)[0]()

    def add(self, least_output: int = 1, is_late: bool = False) -> str:
        """Send a request.

        Args:
            least_output: tokens that it asks for at least.
            is_late: it belongs to a flood: neither held nor in the background.
        """
        rng, limits = self._rng, self._limits
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, limits.max_model_len - least_output))]
        max_tokens = rng.randint(least_output, 16)
        most = min(max_tokens, limits.max_model_len - len(prompt))
        request_id = str(len(self._sent))
        alive = [one for one in self._sent.values() if one.finish_reason is None]
        turns = (len(alive) + 1) * turns_of_an_elder(self._config, limits.max_model_len, self._depth)
        expected = expected_output(prompt, most, limits.eos_token_ids)
        self._sent[request_id] = Sent(prompt, max_tokens, expected, turns)
        status = RequestStatus.WAITING
        if Feature.GRAMMARS in self._serves and not is_late and rng.random() < 0.2:
            status = RequestStatus.WAITING_FOR_GRAMMAR
            self._held.append(request_id)
        message = AddRequest(
            id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            cache_salt=rng.choice(["", "", "s"]),
            tenant=rng.choice(["", "a", "b"]),
            is_background=Feature.BACKGROUND in self._serves and not is_late and rng.random() < 0.2,
        )
        outputs = self._engine.add(message, status)
        demand(not outputs, f"a request that could run is refused: {outputs[0].error if outputs else ''}")
        demand(request_id in self._scheduler.requests, f"request {request_id} was added, and is not in `requests`")
        return request_id

    def wake(self) -> None:
        """Let a request go on that was held since it came."""
        if self._held:
            self._engine.wake(self._held.pop(0))

    def abort(self) -> None:
        """End a request or two, wherever they are; some have ended already, or never were."""
        ids = [str(max(0, len(self._sent) - self._rng.randint(1, 6))) for _ in range(self._rng.randint(1, 2))]
        alive = {one for one in ids if one in self._sent and self._sent[one].finish_reason is None}
        outputs = self._engine.abort([*dict.fromkeys(ids), "unknown"])
        demand({one.id for one in outputs} == alive, "an abort answers other requests than those that it ends")
        demand(all(one.finish_reason is FinishReason.ABORT for one in outputs), "an abort ends with another reason")
        self._collect(outputs, was_aborted=True)

    def fail_step(self) -> None:
        """Let one of the next steps fail: the requests of all launched steps end with it."""
        self._runner.failing_steps.add(self._scheduler.step + self._rng.randint(1, 4))

    def reset(self) -> None:
        """Forget all cached prefixes, and what their pages hold."""
        preempts = self._rng.random() < 0.5
        is_reset = self._engine.reset_prefix_cache(preempts)
        demand(
            is_reset or not preempts or self._scheduler.in_flight,
            "the cache is not reset, though running requests could be preempted and no step is launched",
        )
        if is_reset:
            self._runner.memory[:] = -1  # whoever still reads any of it gets wrong tokens

    def steps(self) -> None:
        """Run some turns of the loop."""
        for _ in range(self._rng.randint(1, 6)):
            self.step()

    def step(self) -> None:
        """Run one turn of the loop, and check all that it has brought."""
        self._num_failed = len([one for one in self._runner.failing_steps if one <= self._scheduler.step + 1])
        outputs = self._engine.step()
        if self._runner.fault is not None:
            raise self._runner.fault
        self._collect(outputs)
        for request_id, sent in self._sent.items():
            if sent.finish_reason is None and request_id not in self._held:
                sent.turns += 1
                if sent.turns > sent.most_turns:
                    raise SchedulerFault(f"request {request_id} starves: {self._scheduler.explain(request_id)}")
        ready = [one for one, sent in self._sent.items() if sent.finish_reason is None and one not in self._held]
        lost = [one for one in ready if one not in self._scheduler.requests]
        demand(not lost, f"request {lost[:1]} is not in `requests`, and was not answered")
        demand(not (self._engine.is_idle and ready), f"nothing runs, though request {ready[:1]} could")

    def _collect(self, outputs: list[TokenOutput], was_aborted: bool = False) -> None:
        for output in outputs:
            name = f"request {output.id}"
            demand(output.id in self._sent, f"{name} is answered, and was never sent")
            sent = self._sent[output.id]
            demand(sent.finish_reason is None, f"{name} is answered after its end")
            sent.tokens += output.token_ids
            sent.finish_reason = output.finish_reason
            expected = sent.expected[: len(sent.tokens)]
            demand(sent.tokens == expected, f"{name} got the tokens {sent.tokens}, its pages should say {expected}")
            self._check_end(name, sent, was_aborted)

    def _check_end(self, name: str, sent: Sent, was_aborted: bool) -> None:
        match sent.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                demand(sent.tokens == sent.expected, f"{name} ends before its last token")
                stops = bool(sent.expected) and sent.expected[-1] in self._limits.eos_token_ids
                demand(stops == (sent.finish_reason is FinishReason.STOP), f"{name} ends with the wrong reason")
            case FinishReason.ABORT:
                demand(was_aborted, f"{name} is aborted by itself")
            case FinishReason.ERROR:
                demand(self._num_failed, f"{name} ends with an error, and no step has failed")

    def flood(self) -> None:
        """Let two requests end among others that come for as long as these two are there."""
        watched = [self._sent[self.add(2, is_late=True)] for _ in range(2)]
        while any(one.finish_reason is None for one in watched):
            while sum(sent.finish_reason is None for sent in self._sent.values()) < self._config.max_num_seqs + 4:
                self.add(2, is_late=True)
            self.step()

    def drain(self) -> None:
        """Run until all is answered; then nothing may be in use."""
        while self._held:
            self.wake()
        while any(sent.finish_reason is None for sent in self._sent.values()):
            self.step()  # each has a bound on its steps
        for _ in range(self._depth):
            self.step()
        demand(not self._scheduler.requests, "requests that have ended stay in `requests`")
        demand(not self._scheduler.in_flight and not self._scheduler.has_work, "work is left, and no request")
        demand(not self._kv.num_pinned, f"{self._kv.num_pinned} pages are still in use")
        try:
            self._engine.stats()
        except TypeError as error:
            raise SchedulerFault(f"`counts` has other fields than `EngineStats` wants: {error}") from error
