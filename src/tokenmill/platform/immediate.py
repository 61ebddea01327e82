"""Streams, events and graphs of a device whose work is done when it is issued: a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from tokenmill.platform.protocol import Event, Tensors


class ImmediateEvent:
    """See `Event`: it has come to pass."""

    def is_past(self) -> bool:
        """See `Event.is_past`."""
        return True

    def wait(self) -> None:
        """See `Event.wait`."""


class ImmediateStream:
    """See `Stream`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self) -> ImmediateEvent:
        """See `Stream.record`."""
        return ImmediateEvent()

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""


class RepeatedWork:
    """See `Graph`: the work itself, done again."""

    def __init__(self, work: Callable[[], Tensors]) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """See `Graph.replay`."""
        for output, values in zip(self.outputs, self._work(), strict=True):
            output.copy_(values)
