"""Memory that is handed out early."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from tokenmill.platform.prefault import CHUNK, begin_small, prefault
from tokenmill.platform.tensor_memory import zeros

SMAPS = Path("/proc/self/smaps")


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping that holds a tensor, by the system's own count."""
    size = 0
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif is_inside and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


@pytest.mark.skipif(not SMAPS.exists(), reason="/proc shows what is resident, on Linux")
def test_memory_is_there_before_its_first_use_and_unchanged():
    tensors = [zeros((2, size), torch.uint8, "cpu") for size in (3 * CHUNK, CHUNK + 5000)]
    tensors[0][1, 7] = 3
    turns = prefault(tensors)
    if not list(itertools.islice(turns, 1)):
        pytest.skip("this system hands nothing out early (Linux 5.14 does)")
    assert resident_bytes(tensors[0]) < 3 * CHUNK
    assert len(list(turns)) == 3 * 4 - 1
    assert all(resident_bytes(tensor) >= tensor.nbytes for tensor in tensors)
    assert tensors[0].sum() == 3


@pytest.mark.skipif(not SMAPS.exists(), reason="/proc shows what is resident, on Linux")
def test_few_bytes_at_the_beginning_of_each_part_take_little_memory():
    numbers = zeros((4, 3 * CHUNK + 12288), torch.uint8, "cpu")
    begin_small([numbers])
    before = resident_bytes(numbers)
    numbers[:, :9000] = 7
    taken = [resident_bytes(part) for part in numbers]
    assert before == 0 and all(9000 <= size < CHUNK for size in taken), "a few small pages of each part"
    numbers[:, -1] = 1
    assert numbers.sum(dtype=torch.int64) == 4 * (7 * 9000 + 1)


def test_nothing_is_done_of_nothing():
    assert list(prefault([])) == []
