"""Measure the machine at this moment: how fast memory is read, and how fast bfloat16 matrices are multiplied.

On a machine that others use too both change from minute to minute; a figure means little without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READ_BYTES = 1 << 30
# Doubled until a product is long enough to time: without instructions for bfloat16 torch takes 250 times as long.
SMALLEST, LARGEST = 128, 2048
LONG_ENOUGH = 0.02  # seconds
TRIES = 6


def probe(threads: int) -> dict[str, float]:
    """Best of a few tries: GB/s of reading memory, and Tflop/s of a bfloat16 product."""
    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    return {"read_gb_per_second": READ_BYTES / 1e9 / _best(numbers.sum), "bf16_tflops": _product_rate() / 1e12}


def _product_rate() -> float:
    """Operations per second of a bfloat16 product, as large a one as takes no time to speak of."""
    size = SMALLEST
    while True:
        square = torch.ones(size, size, dtype=torch.bfloat16)
        seconds = _best(lambda square=square: square @ square)
        if size == LARGEST or seconds > LONG_ENOUGH:
            return 2 * size**3 / seconds
        size *= 2


def _best(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(TRIES))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
