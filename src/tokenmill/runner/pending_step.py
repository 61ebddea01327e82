"""`PendingStep`: a step whose work is issued and whose result is taken in later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from tokenmill.scheduler.plan import StepResult


class LaunchedStep(Protocol):
    """What `launch` gives back; a `Future` is one."""

    def result(self) -> StepResult:
        """Wait for the outcome. Raises what the step raised."""

    def exception(self) -> BaseException | None:
        """Wait for the end; what the step raised, or None."""


class PendingStep:
    """Like a future, but the host's part of the end of a step runs in whoever asks for the result.

    Args:
        finish: waits for the device and puts the result together; called once.
    """

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish: Callable[[], StepResult] | None = finish
        self._result: StepResult | None = None
        self._error: Exception | None = None

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """A step that could not be issued."""
        step = cls(_never)
        step._finish, step._error = None, error
        return step

    def result(self) -> StepResult:
        """The outcome. Raises what the step raised."""
        error = self.exception()
        if error is not None:
            raise error
        assert self._result is not None, "a finished step has a result or an error"
        return self._result

    def exception(self) -> Exception | None:
        """What the step raised, or None."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result = finish()
            except Exception as error:
                self._error = error
        return self._error


def _never() -> StepResult:
    raise AssertionError("a step that failed has nothing to finish")
