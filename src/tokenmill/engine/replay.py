"""Replays a step log: the real engine loop and the real scheduler, with the recorded outcomes in place of a model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.engine.engine import Engine, ModelLimits
from tokenmill.engine.events import Aborted, Added, AnyEvent, CacheReset, Extended, Paused, Woken
from tokenmill.engine.parts import make_scheduler
from tokenmill.engine.step_log import LogHeader, StepRecord, plain_plan, read_log
from tokenmill.request import RequestStatus
from tokenmill.scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome: how many plans were made again, and where the first one differed (None: nowhere)."""

    num_plans: int
    difference: str | None


class RecordedRunner:
    """Answers each plan with what the recorded step brought."""

    def __init__(self, records: list[StepRecord]) -> None:
        self._outcomes = {r.committed: r for r in records if r.committed is not None}
        self.launched: StepPlan | None = None

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """The recorded outcome; a step that was never committed failed, or was cut off with the log."""
        self.launched = plan
        future: Future[StepResult] = Future()
        if plan.step in self._outcomes:
            outcome = self._outcomes[plan.step]
            token_ids = np.array(outcome.token_ids, dtype=np.int32)
            future.set_result(StepResult(plan.step, token_ids, {}, outcome.failures))
        else:
            future.set_exception(RuntimeError("the recorded step brought nothing"))
        return future

    def recover(self) -> None:
        """Nothing was lost."""

    def close(self) -> None:
        """Nothing is running."""


def replay(path: Path) -> Replay:
    """Drive a scheduler with the arrivals and outcomes of a log and compare each plan with the recorded one.

    Raises:
        TokenMillError: the file is no step log.
    """
    header, stored = read_log(path)
    records = list(stored)
    runner = RecordedRunner(records)
    engine = _engine(header, runner)
    num_plans = 0
    for record in records:
        for event in record.events:
            _apply(engine, event)
        runner.launched = None
        engine.step()
        made = None if runner.launched is None else plain_plan(runner.launched)
        difference = next(_differences(record.plan, made), None)
        if difference is not None:
            number = (record.plan or made or {}).get("step")
            return Replay(num_plans, f"step {number}: {difference}")
        num_plans += made is not None
    return Replay(num_plans, None)


def _engine(header: LogHeader, runner: RecordedRunner) -> Engine:
    scheduler = make_scheduler(header.scheduler, header.num_pages, header.page_size, header.enable_prefix_caching)
    limits = ModelLimits(header.max_model_len, header.vocab_size, frozenset(header.eos_token_ids))
    return Engine(scheduler, runner, limits, header.depth)


def _apply(engine: Engine, event: AnyEvent) -> None:
    match event:
        case Added(message, status):
            engine.add(message, RequestStatus(status))
        case Extended(request_id, token_ids, params, is_last):
            engine.extend(request_id, token_ids, params, is_last)
        case Woken(request_id):
            engine.wake(request_id)
        case Aborted(ids):
            engine.abort(ids)
        case CacheReset(preempt_running):
            engine.reset_prefix_cache(preempt_running)
        case Paused(is_paused):
            engine.set_paused(is_paused)


def _differences(recorded: dict[str, Any] | None, made: dict[str, Any] | None) -> Iterator[str]:
    if recorded is None or made is None:
        if recorded is not made:
            yield "a plan was made, none is recorded" if recorded is None else "a plan is recorded, none was made"
        return
    for name, value in recorded.items():
        if made[name] != value:
            yield f"{name}: recorded {value}, made {made[name]}"
