"""Count the steps of an engine; gather its counters and its state, as the API process shows and exports them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tokenmill.core.engine_messages import EngineStats
from tokenmill.core.histogram import SECONDS, TOKENS, Histogram
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepPlan
from tokenmill.engine.scheduler.scheduler import EngineScheduler


class StepStats:
    """Sizes and durations of steps, and when each request first took part in one: costs per step, none per token.

    Attributes:
        step_tokens: tokens that a step ran.
        step_seconds: by part of the loop: schedule, run (launch and wait), commit.
        prompt_tokens, generation_tokens: of all requests since start.
    """

    def __init__(self) -> None:
        self.step_tokens = Histogram.with_bounds(TOKENS)
        self.step_seconds = {part: Histogram.with_bounds(SECONDS) for part in ("schedule", "run", "commit")}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._scheduled_at: dict[str, float] = {}

    def observe_plan(self, plan: StepPlan) -> None:
        """Count a step that begins."""
        self.step_tokens.add(plan.num_tokens)
        for new_row in plan.new_rows:
            self._scheduled_at.setdefault(new_row.request_id, time.monotonic())

    def observe(self, seconds: tuple[float, float, float]) -> None:
        """Count the seconds of one iteration of the loop."""
        for histogram, spent in zip(self.step_seconds.values(), seconds, strict=True):
            histogram.add(spent)

    def stamp(self, outputs: Iterable[TokenOutput]) -> None:
        """Write into the last outputs of requests when these first took part in a step."""
        for output in outputs:
            output.scheduled_at = self._scheduled_at.pop(output.id, 0.0)


def engine_stats(scheduler: EngineScheduler, steps: StepStats, is_stuck: bool) -> EngineStats:
    """Return counters since start, and the state now.

    Args:
        is_stuck: requests could go on, and none does.
    """
    return EngineStats(
        is_stuck=is_stuck,
        step_tokens=steps.step_tokens,
        step_seconds=steps.step_seconds,
        prompt_tokens=steps.prompt_tokens,
        generation_tokens=steps.generation_tokens,
        running_adapters=_adapters(scheduler, is_running=True),
        waiting_adapters=_adapters(scheduler, is_running=False),
        **scheduler.counts(),
    )


def _adapters(scheduler: EngineScheduler, is_running: bool) -> list[str]:
    """Return the names of the adapters of running requests, or of waiting ones."""
    requests = scheduler.requests.values()
    return sorted({one.adapter_name for one in requests if one.adapter_name and one.is_running == is_running})
