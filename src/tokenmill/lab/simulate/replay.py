"""Replay a step log: the real engine loop and the real scheduler, with the recorded outcomes in place of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import IntArray, StepOutcome, StepPlan, StepResult
from tokenmill.core.request import Proposal, RequestStatus
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.step_log import (
    Aborted,
    Added,
    CacheReset,
    Extended,
    LogHeader,
    Paused,
    RecordedInput,
    StepRecord,
    Woken,
    plain_plan,
    read_log,
)
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.scheduler import EngineScheduler


class Replay(msgspec.Struct, frozen=True):
    """The outcome: how many plans were made again, and where the first one differed (None: nowhere)."""

    num_plans: int
    difference: str | None


class RecordedExecutor:
    """Executor that answers each plan with the recorded outcome of its step."""

    def __init__(self, records: list[StepRecord]) -> None:
        self._outcomes = {r.committed: r for r in records if r.committed is not None}
        self.launched: StepPlan | None = None

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Return the recorded outcome; a step that was never committed failed, or was cut off with the log."""
        self.launched = plan
        outcome = self._outcomes.get(plan.step)
        if outcome is None:
            return StepOutcome.failed(RuntimeError("the recorded step brought nothing"))
        token_ids, token_starts = _array(outcome.token_ids), _array(outcome.token_starts)
        proposals = {
            index: Proposal(_array(ids), is_forced, _chances(outcome.chances.get(index)))
            for index, (ids, is_forced) in outcome.proposals.items()
        }
        result = StepResult(plan.step, token_ids, token_starts, failures=outcome.failures, proposals=proposals)
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """Do nothing: no step was lost."""

    def close(self) -> None:
        """Do nothing: no step is running."""


class RecordedAnswers(EngineExtension):
    """Stands in for sources of KV: drops the scheduler's lookups, whose answers are in the log."""

    def __init__(self, scheduler: EngineScheduler) -> None:
        self._scheduler = scheduler

    def before_schedule(self, engine: Host) -> None:
        """Take the lookups, each as it was taken then."""
        self._scheduler.take_queries()


def replay(path: Path, drafter: Drafter | None = None) -> Replay:
    """Drive a scheduler with the arrivals and outcomes of a log and compare each plan with the recorded one.

    Args:
        drafter: one like the recording's, as it was at its start; None: the one that the log names.

    Raises:
        TokenMillError: the file is no step log.
    """
    header, stored = read_log(path)
    records = list(stored)
    executor = RecordedExecutor(records)
    engine = _engine(header, executor, drafter)
    num_plans = 0
    for record in records:
        for arrived in record.inputs:
            apply_input(engine, arrived)
        executor.launched = None
        engine.step()
        made = None if executor.launched is None else plain_plan(executor.launched)
        difference = next(_differences(record.plan, made), None)
        if difference is not None:
            number = (record.plan or made or {}).get("step")
            return Replay(num_plans, f"step {number}: {difference}")
        num_plans += made is not None
    return Replay(num_plans, None)


def _engine(header: LogHeader, executor: RecordedExecutor, drafter: Drafter | None) -> Engine:
    limits = ModelLimits(header.max_model_len, header.vocab_size, frozenset(header.eos_token_ids))
    scheduler = header.make_scheduler(drafter=drafter)
    extensions = () if header.transfers is None else (RecordedAnswers(scheduler),)
    return Engine(scheduler, executor, limits, header.depth, extensions=extensions)


def apply_input(engine: Engine, arrived: RecordedInput) -> list[TokenOutput]:
    """Feed a recorded input to an engine; returns its immediate outputs.

    Raises:
        InvalidRequest: it continues a session that this engine does not have.
    """
    match arrived:
        case Added(message, status):
            return engine.add(message, RequestStatus(status))
        case Extended(request_id, token_ids, params, is_last):
            engine.extend(request_id, token_ids, params, is_last)
        case Woken(request_id):
            engine.wake(request_id)
        case Aborted(ids):
            return engine.abort(ids)
        case CacheReset(preempt_running):
            engine.reset_prefix_cache(preempt_running)
        case Paused(is_paused):
            engine.set_paused(is_paused)
        case _:
            engine.apply_transfer_events([arrived])
    return []


def _chances(values: list[float] | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else np.array(values, dtype=np.float32)


def _array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def _differences(recorded: dict[str, Any] | None, made: dict[str, Any] | None) -> Iterator[str]:
    if recorded is None or made is None:
        if recorded is not made:
            yield "a plan was made, none is recorded" if recorded is None else "a plan is recorded, none was made"
        return
    for name, value in recorded.items():
        if made[name] != value:
            yield f"{name}: recorded {value}, made {made[name]}"
