"""The platform of the fake GPU: its graphs, streams and transports, and ranks on others like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.engine.runner.fake_gpu import DEVICE, KIND, MODE, SEEN, WATCH
from tokenmill.engine.transfer.device_pages import DevicePages
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.device_arrays import DeviceArrays
from tokenmill.platform.immediate import ImmediateStream
from tokenmill.platform.protocol import Tensors

_TORCH_TYPES = {
    np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "uint8", "bool", "uint64")
}


class FakeGraph:
    """Work that was captured: nothing is left to be done."""

    def __init__(self, outputs: Tensors) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        """Do nothing."""


class FakeCommunicator:
    """Ranks on other devices that answer with memory of the right shape."""

    def __init__(self, size: int) -> None:
        self._size = size

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        return self._noted("sum", own)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._noted("gather", own).new_empty(self._size, *own.shape)

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._noted("share", numbers)

    def offer(self, numbers: torch.Tensor) -> Callable[[], object]:
        assert numbers.is_contiguous()
        self._noted("offer", numbers)
        return lambda: None

    def abort(self) -> None:
        pass

    def _noted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        SEEN.launches[SEEN.phase, name] += 1
        if tensor.device.type != KIND:
            SEEN.host_arguments[f"communicator: {name}"] += 1
        return tensor


class FakeGpu(CpuPlatform):
    """An H100 by its numbers."""

    name, device, is_accelerator = KIND, DEVICE, True
    arrays = DeviceArrays(DEVICE)

    def num_units(self) -> int:
        return 132

    def capability(self) -> tuple[int, int]:
        return 9, 0

    def available_bytes(self) -> int:
        return 8 << 30

    def untouched_bytes(self) -> int:
        return 8 << 30

    def communicator(self, meeting: Path, rank: int, size: int, seconds: float) -> FakeCommunicator:
        return FakeCommunicator(size)

    def pinned(self, num_bytes: int) -> Any:
        with _disable_current_modes():
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def capture(self, work: Callable[[], Tensors], stream: object) -> FakeGraph:
        with SEEN.during("start"):
            work()
        with SEEN.during("capture"):
            before = SEEN.launches + SEEN.operations
            graph = FakeGraph(work())
            issued = SEEN.launches + SEEN.operations - before
        SEEN.captures.append({name: count for (phase, name), count in issued.items() if phase == "capture"})
        return graph


class FakeStaging(ImmediateStream):
    """A transport whose arrays come over at once, and whose results are ones."""

    def __init__(self, *parts: object) -> None:
        pass

    def send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        with MODE, WATCH:
            return {
                name: torch.empty(values.shape, dtype=_TORCH_TYPES[values.dtype], device=DEVICE)
                for name, values in arrays.items()
            }

    def fetch(self, *tensors: torch.Tensor) -> list[np.ndarray]:
        found = []
        for number, tensor in enumerate(tensors):
            assert tensor.element_size() == 8, f"{tensor.dtype} in a copy of eight-byte numbers"
            assert tensor.device.type == KIND, "a tensor of the host is fetched"
            dtype = np.int64 if tensor.dtype == torch.int64 else np.float64
            # Tokens are ones, so that requests go on.
            found.append(np.full(tuple(tensor.shape), not number, dtype=dtype))
        return found

    def finish_step(self) -> Any:
        return self.record()


class FakePages(DevicePages):
    """Pages of zeros. Threads copy pages, and fake tensors know none: the copies that are seen are made here."""

    def __init__(self, platform: Any, pieces: Sequence[torch.Tensor], layout: str) -> None:
        super().__init__(platform, pieces, layout)
        page = memoryview(bytearray(self.page_bytes))
        with SEEN.during("step"):
            super().read(1, page)
            super().write(1, page)

    def read(self, page: int, data: memoryview) -> None:
        data[:] = bytes(self.page_bytes)

    def write(self, page: int, data: memoryview) -> None:
        pass
