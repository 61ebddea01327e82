"""Measure how fast a device reads its memory: the bound of a decode step, which reads every weight once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from tokenmill.platform.memory import zeroed_bytes
from tokenmill.platform.protocol import Platform

# Larger than the caches of any machine that this has seen (260 MiB), as far as memory allows.
MOST_BYTES = 512 << 20
LEAST_BYTES = 16 << 20
SECONDS = 0.5
LEAST_PASSES = 3


def read_bandwidth(
    platform: Platform, num_bytes: int = MOST_BYTES, seconds: float = SECONDS, num_threads: int | None = None
) -> float:
    """Measure the bytes per second at which the platform's threads read memory: the best of some passes over an array.

    Args:
        num_bytes: of the array; less where less is free.
        seconds: how long the passes take together; at least three are made.
        num_threads: of the host that read; None: as many as a step uses.
    """
    size = max(min(num_bytes, platform.available_bytes() // 4), LEAST_BYTES)
    if platform.is_accelerator:
        from tokenmill.startup.machine.device_memory import read_device

        return size / _least_seconds(read_device(platform, size), seconds)
    with _read_host(size, num_threads or platform.num_threads()) as read:
        return size / _least_seconds(read, seconds)


def _least_seconds(read: Callable[[], object], seconds: float) -> float:
    best, passes, start = float("inf"), 0, time.perf_counter()
    while passes < LEAST_PASSES or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        read()
        best = min(best, time.perf_counter() - begin)
        passes += 1
    return best


@contextmanager
def _read_host(size: int, num_threads: int) -> Iterator[Callable[[], object]]:
    """Provide a function that reads so many bytes of the host's memory once, a part in each thread."""
    # NumPy finds the largest of integers as fast as memory delivers them, and lets other threads run meanwhile.
    numbers = zeroed_bytes(size // 8 * 8).view(np.int64)
    numbers.fill(1)  # pages that nothing was written to are all one page
    parts = np.array_split(numbers, num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        yield lambda: list(threads.map(np.maximum.reduce, parts))
