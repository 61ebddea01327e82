"""Memory that is handed out early."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tokenmill.platform.memory import zeros
from tokenmill.platform.prefault import CHUNK, prefault


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping that holds a tensor, by the system's own count."""
    size = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif is_inside and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="/proc shows what is resident, on Linux")
def test_memory_is_there_before_its_first_use_and_unchanged():
    tensors = [zeros((2, size), torch.uint8, "cpu") for size in (3 * CHUNK, CHUNK + 5000)]
    tensors[0][1, 7] = 3
    before = [resident_bytes(tensor) for tensor in tensors]
    thread = prefault(tensors)
    thread.join(60)
    assert not thread.is_alive()
    after = [resident_bytes(tensor) for tensor in tensors]
    if after == before:
        pytest.skip("this system hands nothing out early (Linux 5.14 does)")
    assert all(size >= tensor.nbytes for size, tensor in zip(after, tensors, strict=True))
    assert tensors[0].sum() == 3


def test_it_ends_with_the_tensors():
    tensors = [zeros((4, 64 * CHUNK), torch.uint8, "cpu")]
    thread = prefault(tensors)
    tensors.clear()
    thread.join(60)
    assert not thread.is_alive()
