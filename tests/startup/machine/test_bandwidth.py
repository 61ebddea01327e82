"""The measurement of memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.platform.cpu import CpuPlatform
from tokenmill.startup.machine import bandwidth


class Machine(CpuPlatform):
    def available_bytes(self) -> int:
        return 1 << 30


def test_it_is_bytes_by_seconds_of_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 10.0, 12.0, 20.0, 21.0, 30.0, 34.0, 40.0])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(ticks))
    assert bandwidth.read_bandwidth(Machine(), 32 << 20, seconds=0) == (32 << 20) / 1.0


def test_a_tensor_never_takes_more_than_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def zeroed_bytes(size: int) -> npt.NDArray[np.uint8]:
        sizes.append(size)
        return np.zeros(128, np.uint8)

    monkeypatch.setattr(bandwidth, "zeroed_bytes", zeroed_bytes)
    assert bandwidth.read_bandwidth(Machine(), 1 << 40, seconds=0) > 0
    assert sizes == [1 << 28]
