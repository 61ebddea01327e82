"""What the engine counts of its own steps and requests, beside the loop: a few additions a step, none per token."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tokenmill.messages import TokenOutput
from tokenmill.scheduler.plan import StepPlan
from tokenmill.tally import SECONDS, TOKENS, Tally


class Meter:
    """Sizes and durations of steps, and when each request was first part of one.

    Attributes:
        step_tokens: tokens that a step ran.
        step_seconds: by part of the loop: schedule, run (launch and wait), commit.
    """

    def __init__(self) -> None:
        self.step_tokens = Tally.of(TOKENS)
        self.step_seconds = {part: Tally.of(SECONDS) for part in ("schedule", "run", "commit")}
        self._scheduled_at: dict[str, float] = {}

    def launched(self, plan: StepPlan) -> None:
        """A step begins."""
        self.step_tokens.add(plan.num_tokens)
        for new_row in plan.new_rows:
            self._scheduled_at.setdefault(new_row.request_id, time.monotonic())

    def turned(self, seconds: tuple[float, float, float]) -> None:
        """The loop has turned once."""
        for tally, spent in zip(self.step_seconds.values(), seconds, strict=True):
            tally.add(spent)

    def ended(self, outputs: Iterable[TokenOutput]) -> None:
        """Let the last outputs of requests say when these were first part of a step."""
        for output in outputs:
            output.scheduled_at = self._scheduled_at.pop(output.id, 0.0)
