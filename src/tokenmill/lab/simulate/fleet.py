"""Simulate engines behind a router on a virtual clock: the real engine loop, scheduler, cache and router, no model.

An iteration of an engine's loop begins when input has come or its last iteration has ended, with all input until then.
Its outputs are seen when it ends. `StepTimes` decide how long it takes. Between events nothing happens, so an hour of
traffic takes only as long as the decisions of its iterations. It does not simulate text workers, HTTP and the network.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.messages import TokenOutput
from tokenmill.core.part_messages import EngineReport, WatchEngine
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.request import FinishReason
from tokenmill.engine.kv.events import KVEventLog, changes_of
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.observer import Observer
from tokenmill.engine.loop.step_log import Added, LogHeader, News, RecordedInput, StepLog, StepRecord
from tokenmill.engine.runner.executor import Executor
from tokenmill.lab.simulate.lifetimes import Lifetime, Outcome
from tokenmill.lab.simulate.replay import apply_input
from tokenmill.lab.simulate.times import StepTimes
from tokenmill.serving.replicas.routing.policies import RoutingPolicy
from tokenmill.serving.replicas.routing.reporter import Reporter
from tokenmill.serving.replicas.routing.router import Router

# The inbox of the text worker that asks engines how they are.
WORKER = "worker-0"
# What comes at the same moment as an iteration begins is there for it.
ARRIVES, TURNS = 0, 1


class CountingExecutor:
    """Executor that brings every request unique tokens, one a step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Make tokens from request and place, so that a token computed again is the same. Request ids are numbers."""
        brings = plan.num_samples > 0
        places = (plan.num_computed + plan.num_scheduled).astype(np.int64)
        keys = np.array([int(one) for one in plan.request_ids], np.int64)
        token_ids = ((keys * 7919 + places) % self._vocab_size)[brings].astype(np.int32)
        starts = np.zeros(len(keys) + 1, np.int32)
        np.cumsum(brings, out=starts[1:])
        result = StepResult(plan.step, token_ids, starts)
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """Do nothing: no step was lost."""

    def close(self) -> None:
        """Do nothing: no step is running."""


class WatchedExecutor:
    """Wraps an executor and records its last launch and commit.

    Attributes:
        launched: the plan that was launched.
        committed: the number of the step whose outcome was fetched.
    """

    def __init__(self, executor: Executor) -> None:
        self.launched: StepPlan | None = None
        self.committed: int | None = None
        self._executor = executor

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Launch a step and record its plan."""
        self.launched = plan
        outcome = self._executor.launch(plan)

        def finish() -> StepResult:
            self.committed = plan.step
            return outcome.result()

        return StepOutcome(finish)

    def recover(self) -> None:
        """Recover the wrapped executor."""
        self._executor.recover()

    def close(self) -> None:
        """Close the wrapped executor."""
        self._executor.close()


class SimulatedLog(StepLog):
    """A step log whose iterations last as long as on the simulation's clock: each is held until that is known."""

    def __init__(self, path: Path, header: LogHeader) -> None:
        super().__init__(path, header)
        self._held: tuple[StepPlan | None, StepResult | None, StepRecord, News] | None = None

    def add(self, plan: StepPlan | None, result: StepResult | None, record: StepRecord, news: News) -> None:
        """Hold an iteration until its end is known."""
        self._held = plan, result, record, news

    def end_iteration(self, began: float, ended: float) -> None:
        """Write the held iteration with its simulated times."""
        if self._held is not None:
            plan, result, record, news = self._held
            self._held, news.at = None, began
            lasting = msgspec.structs.replace(record, seconds=(0.0, ended - began, 0.0), rest=0.0)
            super().add(plan, result, lasting, news)


class SimulatedEngine:
    """The loop of an engine, an iteration at a time. `log`: the log of its steps; None: they are not logged.

    Attributes:
        inbox: inputs since the last iteration began.
        is_busy: an iteration is going on or about to begin.
        busy_seconds: of all iterations so far.
    """

    def __init__(
        self, header: LogHeader, executor: Executor, times: StepTimes, log: SimulatedLog | None = None
    ) -> None:
        limits = ModelLimits(header.max_model_len, header.vocab_size, frozenset(header.eos_token_ids))
        self._executor = WatchedExecutor(executor)
        self.engine = Engine(header.make_scheduler(), self._executor, limits, header.depth, Observer(log))
        self._log = log
        self.inbox: list[RecordedInput] = []
        self.is_busy = False
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self._times = times

    def run_iteration(self, now: float) -> tuple[list[TokenOutput], float]:
        """Run an iteration that begins at `now`; returns its outputs and its end."""
        came, self.inbox = self.inbox, []
        outputs = [output for one in came for output in apply_input(self.engine, one)]
        self._executor.launched = self._executor.committed = None
        outputs += self.engine.step()
        plan = self._executor.launched
        if plan is not None:
            self.num_steps += 1
            self.num_tokens += plan.num_tokens
        end = self._times.end_of_iteration(now, plan, self._executor.committed, bool(came))
        self.busy_seconds += end - now
        if self._log is not None:
            self._log.end_iteration(now, end)
        return outputs, end

    def close(self) -> None:
        """Finish the log."""
        if self._log is not None:
            self._log.close()


class Fleet:
    """Engines behind one router. `run` serves one trace."""

    def __init__(self, engines: Sequence[SimulatedEngine], policy: RoutingPolicy, page_size: int) -> None:
        """
        Args:
            policy: decides which of several engines gets a request.
            page_size: tokens of a page; 0: no prefix is cached.
        """
        self._engines = engines
        self._router = Router(range(len(engines)), policy) if len(engines) > 1 else None
        self._reporters: list[Reporter] = []
        self._lifetimes: dict[str, Lifetime] = {}
        self._events: list[tuple[float, int, int]] = []
        self._outputs: list[list[TokenOutput]] = [[] for _ in engines]
        if self._router is not None:
            self._router.begin_routing(page_size, "")
            for index, one in enumerate(engines):
                self._reporters.append(self._reporter(self._router, one, index))

    def _reporter(self, router: Router, one: SimulatedEngine, index: int) -> Reporter:
        def send(_: str, report: EngineReport) -> None:
            report.engine = index
            router.apply_report(report)

        one.engine.scheduler.kv.cache.events = log = KVEventLog()
        reporter = Reporter(send, log.names)
        reporter.heed(WatchEngine(WORKER))
        return reporter

    def run(self, inputs: Iterable[tuple[float, RecordedInput]]) -> Outcome:
        """Feed all inputs to the engines and run until no work is left.

        Args:
            inputs: each with its moment, in order; all but `Added` go to the first engine.

        Raises:
            TokenMillError: an iteration has no time; see `StepTimes`.
        """
        came = list(inputs)
        self._events = [(seconds, ARRIVES, place) for place, (seconds, _) in enumerate(came)]
        first = self._events[0][0] if self._events else 0.0
        heapq.heapify(self._events)
        now = first
        while self._events:
            now, kind, place = heapq.heappop(self._events)
            if kind == ARRIVES:
                self._arrive(now, came[place][1])
            else:
                self._run_iteration(now, place)
        stats = [one.engine.stats() for one in self._engines]
        return Outcome(
            lifetimes=self._lifetimes,
            seconds=now - first,
            num_steps=sum(one.num_steps for one in self._engines),
            num_tokens=sum(one.num_tokens for one in self._engines),
            num_preemptions=sum(one.num_preemptions for one in stats),
            busy=[one.busy_seconds for one in self._engines],
            queried=sum(one.prefix_queries for one in stats),
            hits=sum(one.prefix_hits for one in stats),
        )

    def _arrive(self, now: float, arrived: RecordedInput) -> None:
        index = 0
        if isinstance(arrived, Added):
            message = arrived.message
            if self._router is not None:
                message.worker = WORKER
                index = self._router.route(message) or 0
                self._reporters[index].heed(message)
            self._lifetimes[message.id] = Lifetime(message.tenant, now, index, len(message.prompt_token_ids))
        engine = self._engines[index]
        engine.inbox.append(arrived)
        if not engine.is_busy:
            engine.is_busy = True
            heapq.heappush(self._events, (now, TURNS, index))

    def _run_iteration(self, now: float, index: int) -> None:
        """Show the outputs of an engine's last iteration, if there was one, and begin the next."""
        self._observe(now, index)
        engine = self._engines[index]
        if not engine.inbox and not engine.engine.has_work:
            engine.is_busy = False
            return
        had_inputs = bool(engine.inbox)
        self._outputs[index], end = engine.run_iteration(now)
        if engine.engine.is_idle and not had_inputs:
            # What waits, waits for something from outside.
            engine.is_busy = False
            return
        heapq.heappush(self._events, (end, TURNS, index))

    def _observe(self, now: float, index: int) -> None:
        outputs, self._outputs[index] = self._outputs[index], []
        if self._router is not None:
            engine = self._engines[index].engine
            self._reporters[index].report(changes_of(engine.take_kv_events()), engine.scheduler.requests, now)
            self._router.ended(outputs)
        for output in outputs:
            lifetime = self._lifetimes[output.id]
            lifetime.times += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                lifetime.end = now
                lifetime.error = (output.error or "failed") if output.finish_reason is FinishReason.ERROR else None
