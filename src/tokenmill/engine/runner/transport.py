"""Carry a step's arrays to the device that runs the model, and its tokens back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from tokenmill.model.attention.row_extension import Arrays, Sent
from tokenmill.platform.immediate import ImmediateStream

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.platform.arrays import Array
    from tokenmill.platform.protocol import Event


class Transport(Protocol):
    """Carries one step at a time: `send`, the step's work inside of the context manager, `fetch` and `finish`."""

    def send(self, arrays: Arrays) -> Sent:
        """Begin a step: return its arrays on the device."""

    def __enter__(self) -> Self:
        """Issue work to the device."""

    def __exit__(self, *error: object) -> None:
        """Issue work where it went before."""

    def fetch(self, *arrays: Array) -> Sequence[npt.NDArray[Any]]:
        """Begin to copy eight-byte numbers to the host; there after the event of `finish_step`."""

    def finish_step(self) -> Event:
        """Return the event behind all of the step's work."""


class HostTransport(ImmediateStream):
    """Transport to a device that shares the host's memory: it copies nothing and never waits."""

    def send(self, arrays: Arrays) -> Sent:
        """Return the arrays as they are."""
        return arrays

    def fetch(self, *arrays: Array) -> Sequence[npt.NDArray[Any]]:
        """Return the arrays as they are."""
        return arrays

    def finish_step(self) -> Event:
        """Return an event behind the step's work."""
        return self.record()
