"""Streams, events and graphs of a device whose work is done when it is issued: a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from tokenmill.platform.protocol import Event, Tensors


class ImmediateEvent:
    """An event that is past from the beginning."""

    def is_past(self) -> bool:
        """Return True: the work is done."""
        return True

    def wait(self) -> None:
        """Return at once."""


class ImmediateStream:
    """A stream whose work is done when it is issued."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self) -> ImmediateEvent:
        """Return an event that is past."""
        return ImmediateEvent()

    def wait_for(self, event: Event) -> None:
        """Do nothing: the event is past."""


class RepeatedWork:
    """A graph that does the work itself again."""

    def __init__(self, work: Callable[[], Tensors]) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """Do the work again, and copy its results into `outputs`."""
        for output, values in zip(self.outputs, self._work(), strict=True):
            output.copy_(values)
