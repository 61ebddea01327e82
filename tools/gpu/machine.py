"""The machine: what it is, and how fast it copies and multiplies; the floors are made of these two rates."""

from __future__ import annotations

import importlib.util
import os
import platform as host
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.device_arrays import DeviceArrays


class DryPlatform(CpuPlatform):
    """A CPU in the place of a GPU: every line of this check can run without one; its figures mean nothing."""

    name = "dry"
    is_accelerator = True
    arrays: ArrayLibrary = DeviceArrays("cpu")

    def num_units(self) -> int:
        """A few."""
        return 8

    def pinned(self, num_bytes: int) -> Any:
        """A tensor, as a GPU's host memory is."""
        return torch.empty(num_bytes, dtype=torch.uint8)


def make_platform(device: str) -> Any:
    """The GPU, or what stands in for it.

    Raises:
        InvalidConfig: there is no GPU.
    """
    if device == "cpu":
        return DryPlatform()
    from tokenmill.platform.cuda import CudaPlatform

    return CudaPlatform()


def describe(platform: Any) -> dict[str, Any]:
    """Names, versions and rates."""
    return {
        "copy_gb_per_s": copy_rate(platform) / 1e9,
        "matmul_tflops": matmul_rate(platform) / 1e12,
        "device": getattr(platform, "device_name", f"none ({host.processor() or host.machine()})"),
        "capability": ".".join(map(str, platform.capability())),
        "multiprocessors": platform.num_units(),
        "free_bytes": platform.available_bytes(),
        "host_cores": os.cpu_count(),
        "python": host.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "transformers": importlib.util.find_spec("transformers") is not None,
        "flashinfer": importlib.util.find_spec("flashinfer") is not None,
    }


def seconds_of(work: Callable[[], object], platform: Any, repeats: int = 5) -> float:
    """Median of the seconds that some work takes, after a first time that does not count."""
    work()
    times = []
    for _ in range(repeats):
        platform.synchronize()
        start = time.perf_counter()
        work()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_seconds(work: Callable[[], object], platform: Any, repeats: int = 20) -> float:
    """Seconds that the device itself takes for some work, by events around all repeats on the current stream."""
    work()
    if platform.name != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.Event(torch.device(platform.device), enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def copy_rate(platform: Any) -> float:
    """Bytes read and written per second by a copy within the device's memory, ten at a time."""
    size = 1 << (30 if platform.name == "cuda" else 22)
    source = torch.ones(size, dtype=torch.uint8, device=platform.device)
    target = torch.empty_like(source)

    def work() -> None:
        for _ in range(10):
            target.copy_(source)

    return 10 * 2 * size / seconds_of(work, platform)


def matmul_rate(platform: Any) -> float:
    """bfloat16 operations per second of a large product."""
    size = 8192 if platform.name == "cuda" else 256
    a = torch.randn(size, size, device=platform.device).bfloat16()
    b = torch.randn(size, size, device=platform.device).bfloat16()

    def work() -> None:
        for _ in range(10):
            a @ b

    return 10 * 2 * size**3 / seconds_of(work, platform)
