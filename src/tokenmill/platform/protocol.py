"""`Platform`: the interface of a device, with its streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import AnyArray
    from tokenmill.platform.communicator import Communicator
    from tokenmill.platform.peer_memory import PeerMemory

Tensors: TypeAlias = "tuple[torch.Tensor, ...]"


class Event(Protocol):
    """A point in a stream's work."""

    def is_past(self) -> bool:
        """Return True if the work before it is done."""

    def wait(self) -> None:
        """Let the host wait until the work before it is done."""


class Stream(Protocol):
    """A queue of work on a device. As a context manager it takes the work that is issued inside."""

    def __enter__(self) -> Self:
        """Issue work here."""

    def __exit__(self, *error: object) -> None:
        """Issue work where it went before."""

    def record(self) -> Event:
        """Return an event behind the work issued so far."""

    def wait_for(self, event: Event) -> None:
        """Start later work of this stream only after an event of another one; the host does not wait."""


class Graph(Protocol):
    """Work that was captured once and can be run again, on the same memory."""

    @property
    def outputs(self) -> Tensors:
        """Tensors that the work returned; a replay overwrites them."""

    def replay(self) -> None:
        """Issue the work again."""


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: e.g. `cpu`.
        device: the name of the device in torch.
        is_accelerator: True if the host issues work and another device does it.
        arrays: makes the arrays that steps work on.
    """

    name: str
    device: str
    is_accelerator: bool
    arrays: ArrayLibrary

    def available_bytes(self) -> int:
        """Return the memory that can still be taken, in bytes."""

    def untouched_bytes(self) -> int:
        """Return the bytes of it not held since `available_bytes` was called; they show the peak use."""

    def num_units(self) -> int:
        """Return how many programs run side by side on the device: cores, or multiprocessors."""

    def capability(self) -> tuple[int, int]:
        """Return the device's generation, (major, minor); (0, 0) where that means nothing."""

    def num_threads(self) -> int:
        """Return the number of host threads that a step should use."""

    def threads_reason(self) -> str:
        """Return why `num_threads` is that number."""

    def set_num_threads(self, wanted: int | None = None) -> int:
        """Return how many host threads to use (default: `num_threads()`), and tell torch if it is there."""

    def stream(self) -> Stream:
        """Return a new queue of work, behind all that has been issued until now."""

    def pinned(self, num_bytes: int) -> AnyArray:
        """Return [num_bytes] uint8 on the host, which the device can copy to and from without the host's help."""

    def capture(self, work: Callable[[], Tensors], stream: Stream) -> Graph:
        """Run some work once, and capture it as a graph. All graphs of a stream share one pool of memory.

        Args:
            work: allocates nothing that must outlive it except its results, and never waits for the device.
            stream: where the graph is replayed.
        """

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> Communicator:
        """Return what connects this rank to the others, each on a device of its own.

        Args:
            meeting: path that all ranks know, of a file that does not exist yet.
            seconds: how long a rank waits for the others.
        """

    def peer_memory(self, meeting: Path, rank: int, size: int, num_bytes: int, seconds: float) -> PeerMemory:
        """Return zeroed memory of each rank's device, `num_bytes` of each, that the devices of all can read and write.

        Args:
            meeting, seconds: as `communicator` has them.

        Raises:
            RuntimeError: these devices cannot read each other's memory.
        """

    def synchronize(self) -> None:
        """Wait for all work, and raise the error of a device that has failed. Not for a step that goes well."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error says that the device's memory, or the host's, is full."""
