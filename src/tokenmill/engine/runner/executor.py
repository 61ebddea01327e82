"""Executors: run the steps. The engine launches a plan and comes back for its outcome; it knows no more.

A runner says what a step is. An executor decides where and when it happens: at once, on a thread, in several processes,
or by a clock that only counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tokenmill.core.errors import EngineFailed
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order of their launch."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Start a step. After a failed one all are refused until `recover`: their differences build on its."""

    def recover(self) -> None:
        """Wait for the launched steps after a failure, then run plans again.

        Raises:
            EngineFailed: the device has failed.
        """

    def close(self) -> None:
        """Wait for the launched steps, and release what they ran with."""


class StepRunner(Protocol):
    """The part of `ModelRunner` that an executor needs."""

    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step behind the previous one; return a function that waits for its end and makes the result."""

    def close(self) -> None:
        """Release what steps ran with."""


class InlineExecutor:
    """Starts each step where it is launched and finishes it where its result is asked for.

    On a device with a queue of its own this is overlap: to start is to issue, and the device goes on by itself.

    Args:
        synchronize: waits for the device; raises if it is dead, not only the step.
    """

    def __init__(self, runner: StepRunner, synchronize: Callable[[], None] = lambda: None) -> None:
        self.runner = runner
        self._synchronize = synchronize
        self._previous: StepOutcome | None = None

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Start a step, unless the previous one has failed already."""
        previous = self._previous
        try:
            if previous is not None and previous.error is not None:
                raise RuntimeError("a step before this one failed")
            outcome = StepOutcome(self.runner.start(plan, previous))
        except Exception as error:
            outcome = StepOutcome.failed(error)
        self._previous = outcome
        return outcome

    def recover(self) -> None:
        """Wait for the last step and the device; raise EngineFailed if the device is dead."""
        self._wait()
        try:
            self._synchronize()
        except Exception as error:
            what = str(error).partition("\n")[0]
            raise EngineFailed(f"the device has failed and runs no further step: {what}") from error

    def close(self) -> None:
        """Wait for the last step and close the runner."""
        self._wait()
        self.runner.close()

    def _wait(self) -> None:
        if self._previous is not None:
            self._previous.wait()
        self._previous = None


class ThreadExecutor:
    """Runs each step from beginning to end on a thread of its own: overlap on a device that is the host.

    Kernels run without the interpreter's lock, so the engine schedules the next step meanwhile.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._inline = InlineExecutor(runner)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Queue a step for the thread."""
        return StepOutcome(self._thread.submit(self._run, plan).result)

    def _run(self, plan: StepPlan) -> StepResult:
        return self._inline.launch(plan).result()

    def recover(self) -> None:
        """Wait for the launched steps, then recover on the thread."""
        self._thread.submit(self._inline.recover).result()

    def close(self) -> None:
        """End the thread after its last step, then close the runner."""
        self._thread.shutdown(wait=True)
        self._inline.close()
