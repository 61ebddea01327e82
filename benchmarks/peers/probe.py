"""Measure the machine at this moment: how fast memory is read, and how fast bfloat16 matrices are multiplied.

On a machine that others use too both change from minute to minute; a figure means little without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READ_BYTES = 1 << 30
MATRIX = 2048
TRIES = 6


def probe(threads: int) -> dict[str, float]:
    """Best of a few tries: GB/s of reading memory, and Tflop/s of a bfloat16 product."""
    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    square = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16)
    return {
        "read_gb_per_second": READ_BYTES / 1e9 / _best(numbers.sum),
        "bf16_tflops": 2 * MATRIX**3 / 1e12 / _best(lambda: square @ square),
    }


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
