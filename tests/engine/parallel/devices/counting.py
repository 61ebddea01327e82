"""Count the messages between ranks on devices, with gloo between CPUs in place of the devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.engine.runner.fake_platform import FakePlatform
from tokenmill.platform.communicator import Communicator

Call = tuple[str, tuple[int, ...], str]
"""A call, with the shape and type that it was given."""


class CountingCommunicator:
    """Notes every call, and lets another communicator see to it."""

    def __init__(self, communicator: Communicator, order: list[str] | None = None) -> None:
        self.calls: list[Call] = []
        self._order = [] if order is None else order
        self.is_aborted = False
        self._communicator = communicator

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        self._note("sum", own)
        return self._communicator.sum(own)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        self._note("gather", own)
        return self._communicator.gather(own)

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        self._note("share", numbers)
        return self._communicator.share(numbers)

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        self._note("offer", numbers)
        return self._communicator.offer(numbers)

    def abort(self) -> None:
        self.is_aborted = True
        self._communicator.abort()

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        self._order.append(name)
        self.calls.append((name, tuple(tensor.shape), str(tensor.dtype)))


class RankPlatform(FakePlatform):
    """A GPU of the imagination for each rank.

    Attributes:
        channels: its communicators, by the names of the files at which their ranks meet.
        order: the names of the calls of all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[str, CountingCommunicator] = {}
        self.order: list[str] = []

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> CountingCommunicator:
        made = CountingCommunicator(super().communicator(meeting, rank, size, seconds), self.order)
        self.channels[meeting.name] = made
        return made

    @property
    def calls(self) -> dict[str, list[Call]]:
        """The calls of each communicator."""
        return {name: channel.calls for name, channel in self.channels.items()}

    def abort(self) -> None:
        for channel in self.channels.values():
            channel.abort()
