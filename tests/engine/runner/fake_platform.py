"""A GPU of the imagination: work is done on the CPU at once, but who waits for what is checked and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.device_arrays import DeviceArrays
from tokenmill.platform.immediate import RepeatedWork
from tokenmill.platform.protocol import Tensors


class FakeEvent:
    def __init__(self, platform: FakePlatform, stream: FakeStream) -> None:
        self.platform = platform
        self.stream = stream

    def is_past(self) -> bool:
        return True

    def wait(self) -> None:
        self.platform.host_waits.append(self)


class FakeStream:
    def __init__(self, platform: FakePlatform) -> None:
        self.platform = platform
        self.waited_for: list[FakeEvent] = []

    def __enter__(self) -> Self:
        self.platform.entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self.platform.entered.pop() is self

    def record(self) -> FakeEvent:
        event = FakeEvent(self.platform, self)
        self.platform.events.append(event)
        return event

    def wait_for(self, event: FakeEvent) -> None:
        assert event.stream is not self, "a stream need not wait for itself"
        self.waited_for.append(event)


class FakeGraph(RepeatedWork):
    def __init__(self, platform: FakePlatform, work: Callable[[], Tensors]) -> None:
        super().__init__(work)
        self._platform = platform

    def replay(self) -> None:
        self._platform.replays += 1
        super().replay()


class FakePlatform(CpuPlatform):
    """Attributes say what has happened.

    Attributes:
        host_waits: events that the host has waited for. events: all that were recorded.
        memory_for_graphs: captures that succeed before the memory is full.
    """

    name = "fake"
    is_accelerator = True
    arrays = DeviceArrays("cpu")

    def __init__(self, memory_for_graphs: int = 1000) -> None:
        super().__init__()
        self.host_waits: list[FakeEvent] = []
        self.events: list[FakeEvent] = []
        self.entered: list[FakeStream] = []
        self.captured: list[int] = []
        self.pinned_sizes: list[int] = []
        self.replays = 0
        self.memory_for_graphs = memory_for_graphs

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def num_units(self) -> int:
        return 16

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.pinned_sizes.append(num_bytes)
        # What was never written must not be read.
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def capture(self, work: Callable[[], Tensors], stream: FakeStream) -> FakeGraph:
        if len(self.captured) >= self.memory_for_graphs:
            raise MemoryError
        graph = FakeGraph(self, work)
        self.captured.append(len(graph.outputs[0]))
        return graph
