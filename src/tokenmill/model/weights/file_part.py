"""Fill memory with bytes of a file. Knows no torch: a command that looks at a header does not wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tokenmill.core.errors import InvalidCheckpoint


def read_bytes(descriptor: int, memory: memoryview, offset: int, path: Path) -> None:
    """Fill memory from a place of a file.

    Raises:
        InvalidCheckpoint: the file ends before.
    """
    for start, count in _reads(descriptor, memory, offset):
        if count == 0:
            raise InvalidCheckpoint(f"{path} ends at byte {offset + start}, and {len(memory) - start} more are wanted")


def _reads(descriptor: int, memory: memoryview, offset: int) -> Iterator[tuple[int, int]]:
    """Read into the memory, 2 GiB at most each time; yield where each read began in it, and its number of bytes."""
    start = 0
    while start < len(memory):
        count = os.preadv(descriptor, [memory[start:]], offset + start)
        yield start, count
        start += count
