"""Measure how fast a device reads its memory: the bound of a decode step, which reads every weight once."""

from __future__ import annotations

import time

import torch

from tokenmill.platform.protocol import Platform

# Larger than the caches of any machine that this has seen (260 MiB), as far as memory allows.
MOST_BYTES = 512 << 20
LEAST_BYTES = 16 << 20
SECONDS = 0.5
LEAST_PASSES = 3


def read_bandwidth(platform: Platform, num_bytes: int = MOST_BYTES, seconds: float = SECONDS) -> float:
    """Measure the bytes per second at which the platform's threads read memory: the best of some passes over a tensor.

    Args:
        num_bytes: of the tensor; less where less is free.
        seconds: how long the passes take together; at least three are made.
    """
    size = max(min(num_bytes, platform.available_bytes() // 4), LEAST_BYTES)
    stream = platform.stream()
    values = torch.ones(size // 4, dtype=torch.float32, device=platform.device)
    best, passes, start = float("inf"), 0, time.perf_counter()
    while passes < LEAST_PASSES or time.perf_counter() - start < seconds:
        stream.record().wait()
        begin = time.perf_counter()
        with stream:
            values.sum()
        stream.record().wait()
        best = min(best, time.perf_counter() - begin)
        passes += 1
    return values.nbytes / best
