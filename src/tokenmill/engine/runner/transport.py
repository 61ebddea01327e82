"""How a step's arrays get to where the model runs, and its tokens back to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy.typing as npt
import torch

from tokenmill.platform.immediate import ImmediateStream
from tokenmill.platform.protocol import Event

Arrays = dict[str, npt.NDArray[Any]]
"""What the host knows of a step, by name."""
Sent = Mapping[str, torch.Tensor]
"""The same arrays on the device."""


class Transport(Protocol):
    """One step at a time: `send`, the step's work inside of the context manager, `fetch` and `finish`."""

    def send(self, arrays: Arrays) -> Sent:
        """Begin a step: its arrays on the device."""

    def __enter__(self) -> Self:
        """Issue work to the device."""

    def __exit__(self, *error: object) -> None:
        """Issue work where it went before."""

    def fetch(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Begin to copy eight-byte numbers to the host, once a step; there when the event of `finish` has come."""

    def finish(self) -> Event:
        """All of the step is issued; the event behind it."""


class HostTransport(ImmediateStream):
    """A device that shares the host's memory: nothing is copied and nobody waits."""

    def send(self, arrays: Arrays) -> Sent:
        """See `Transport`."""
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def fetch(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """See `Transport`."""
        return tensors

    def finish(self) -> Event:
        """See `Transport`."""
        return self.record()
