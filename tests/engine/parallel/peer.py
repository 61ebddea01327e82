"""A rank that only meets and reads: `peer.py DESCRIPTOR RANK SIZE WORK COUNT`, with nothing but the extension loaded.

DESCRIPTOR is of memory whose first page is the signals and whose second one has a number for each rank. It prints a
line when it begins to wait, and one that says how that ended.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import mmap
import os
import sys
from typing import Any

import numpy as np

PAGE = 4096
TIMEOUT = 20.0
SLOTS = 4


def native() -> Any:
    """The extension, without the package around it, which takes longer to load."""
    path = os.environ["TOKENMILL_NATIVE"]
    loader = importlib.machinery.ExtensionFileLoader("_native", path)
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None, "it has a loader"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def memory_of(descriptor: int) -> np.ndarray:
    """The memory, as bytes."""
    return np.frombuffer(mmap.mmap(descriptor, 16 * PAGE), np.uint8)


def meet_often(ranks: Any, numbers: np.ndarray, rank: int, count: int) -> str:
    """Meet, and see each time that all have come exactly as often, or once more."""
    for turn in range(1, count + 1):
        numbers[rank] = turn
        if outcome := ranks.meet(TIMEOUT):
            return f"outcome {outcome} in turn {turn}"
        if numbers.min() < turn or numbers.max() > turn + 1:
            return f"in turn {turn} the others are at {numbers.tolist()}"
    return "met"


def read_all(ranks: Any, slots: np.ndarray, count: int) -> str:
    """Read the numbers that rank 0 posts, which come in order."""
    for number in range(count):
        if outcome := ranks.wait_post(TIMEOUT):
            return f"outcome {outcome} at message {number}"
        if slots[number % SLOTS] != number:
            return f"message {number} is {slots[number % SLOTS]}"
        ranks.take()
    return "read"


def main() -> None:
    """Do the work and say how it ended."""
    descriptor, rank, size = map(int, sys.argv[1:4])
    work, count = sys.argv[4], int(sys.argv[5])
    memory = memory_of(descriptor)
    numbers = memory[PAGE : PAGE + 8 * size].view(np.int64)
    slots = memory[2 * PAGE : 2 * PAGE + 8 * SLOTS].view(np.int64)
    ranks = native().Ranks(memory.ctypes.data, rank, size, 0.0, TIMEOUT, [])
    print("ready", flush=True)
    if work == "meet":
        print(meet_often(ranks, numbers, rank, count), flush=True)
    elif work == "read":
        print(read_all(ranks, slots, count), flush=True)
    else:
        ranks.meet(TIMEOUT)
        ranks.give_up()


if __name__ == "__main__":
    main()
