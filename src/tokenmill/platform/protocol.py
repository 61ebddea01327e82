"""What the rest of the engine may ask of a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

import torch

from tokenmill.platform.communicator import Communicator

Tensors = tuple[torch.Tensor, ...]


class Event(Protocol):
    """A point in a stream's work."""

    def is_past(self) -> bool:
        """Whether the work before it is done."""

    def wait(self) -> None:
        """Let the host wait until the work before it is done."""


class Stream(Protocol):
    """A queue of work on a device. As a context manager it takes what is issued inside."""

    def __enter__(self) -> Self:
        """Issue work here."""

    def __exit__(self, *error: object) -> None:
        """Issue work where it went before."""

    def record(self) -> Event:
        """An event behind the work issued so far."""

    def wait_for(self, event: Event) -> None:
        """Work issued from now on starts after an event of another stream; the host does not wait."""


class Graph(Protocol):
    """Work that was captured once and can be run again, on the same memory."""

    @property
    def outputs(self) -> Tensors:
        """What the work gave back; a replay overwrites it."""

    def replay(self) -> None:
        """Issue the work again."""


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: e.g. `cpu`.
        device: what torch calls it.
        is_accelerator: work is issued by the host and done by a device of its own.
    """

    name: str
    device: str
    is_accelerator: bool

    def available_bytes(self) -> int:
        """Memory that can still be taken, in bytes."""

    def untouched_bytes(self) -> int:
        """Of that, what has not been held since `available_bytes` was asked for: it shows how high the use has been."""

    def num_units(self) -> int:
        """How many programs run side by side on the device: cores, or multiprocessors."""

    def capability(self) -> tuple[int, int]:
        """The device's generation, (major, minor); (0, 0) where that means nothing."""

    def num_threads(self) -> int:
        """Host threads that a step should use."""

    def threads_reason(self) -> str:
        """Why it is that many."""

    def set_num_threads(self, wanted: int | None = None) -> int:
        """Tell torch how many threads to use, `num_threads()` if it is left to us; returns the number."""

    def stream(self) -> Stream:
        """A new queue of work, behind all that has been issued until now."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 on the host, where the device can copy from and to without the host's help."""

    def capture(self, work: Callable[[], Tensors], stream: Stream) -> Graph:
        """Run some work once, and capture it as a graph. All graphs of a stream share one pool of memory.

        Args:
            work: allocates nothing that has to live on but what it gives back, and never waits for the device.
            stream: where the graph is replayed.
        """

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> Communicator:
        """What ranks tell each other, each on a device of its own.

        Args:
            meeting: a file that all ranks know, and that does not exist before.
            seconds: how long one waits for the others.
        """

    def synchronize(self) -> None:
        """Wait for all work: never in a step that goes well. Raises what a device that has failed says of it."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device's memory, or the host's, is full."""
