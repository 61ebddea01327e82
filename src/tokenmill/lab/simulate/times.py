"""Time the iterations of an engine in a simulation: by a fitted model, or as they were recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokenmill.core.errors import TokenMillError
from tokenmill.core.plan import StepPlan
from tokenmill.engine.loop.step_log import LogHeader, RecordedInput, StepRecord, read_log
from tokenmill.lab.simulate.step_model import StepModel, StepSize


class StepTimes(Protocol):
    """The clock of one engine."""

    def end_of_iteration(self, now: float, launched: StepPlan | None, committed: int | None, had_inputs: bool) -> float:
        """Return the end of the iteration that began at `now`.

        Args:
            launched: the step that it launched.
            committed: the number of the step that it committed.
            had_inputs: inputs had come before it.
        """
        ...


class ModelTimes:
    """Times by a model: steps run one by one; an iteration lasts until its committed step has ended, or no time."""

    def __init__(self, model: StepModel, seed: int | None, is_bound: bool = True) -> None:
        """
        Args:
            seed: of the random part of step times; None: exactly the times of the model.
            is_bound: refuse steps beyond the sizes that the model was fitted to.
        """
        self._model = model
        self._seed = seed
        self._is_bound = is_bound
        self._ends: dict[int, float] = {}
        self._free_at = 0.0

    def end_of_iteration(self, now: float, launched: StepPlan | None, committed: int | None, had_inputs: bool) -> float:
        """Return the end of an iteration by the model's seconds of its steps.

        Raises:
            InvalidConfig: a step is beyond the sizes that the model was fitted to.
        """
        if launched is not None:
            size = StepSize.from_plan(launched)
            if self._is_bound:
                self._model.check_domain(size)
            key = None if self._seed is None else (self._seed << 40) + launched.step
            seconds = self._model.seconds(size) if key is None else self._model.drawn_seconds(size, key)
            self._free_at = self._ends[launched.step] = max(now, self._free_at) + seconds
        return now if committed is None else max(now, self._ends.pop(committed))


class RecordedTimes:
    """Times by a log: iterations last as long as its iterations did, one after the other."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = iter(seconds)

    def end_of_iteration(self, now: float, launched: StepPlan | None, committed: int | None, had_inputs: bool) -> float:
        """Return the end of an iteration by the log's next recorded time. Logs leave out iterations without events.

        Raises:
            TokenMillError: the log has no more iterations.
        """
        if launched is None and committed is None and not had_inputs:
            return now
        seconds = next(self._seconds, None)
        if seconds is None:
            raise TokenMillError(
                "the simulation has more iterations than the log: it was cut off, or records another version"
            )
        return now + seconds


def recorded_run(path: Path) -> tuple[LogHeader, list[StepRecord], list[tuple[float, RecordedInput]], RecordedTimes]:
    """Read everything for running a log again: header, records, inputs with their times, and iterations' times.

    The clock counts only the time in which there was work.

    Raises:
        TokenMillError: the file is no step log.
    """
    header, stored = read_log(path)
    records = list(stored)
    inputs, clock, seconds = [], 0.0, []
    for record in records:
        inputs += [(clock, arrived) for arrived in record.inputs]
        seconds.append(record.all_seconds)
        clock += seconds[-1]
    return header, records, inputs, RecordedTimes(seconds)
