"""Saves take the memory of a page or two, however long the conversation is: bytes that Python allocates are counted.

And loads from a disk have the pages fetched that come next.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.request import CacheKey
from tokenmill.core.transfers import LoadOrder, SaveOrder
from tokenmill.engine.transfer.orders import Movers, PageLoad, PageSave, write_one_by_one
from tokenmill.engine.transfer.protocol import SourceContext
from tokenmill.engine.transfer.session_file import SessionForm
from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slot_table import RUN_BYTES
from tokenmill.engine.transfer.slots import Slot
from tokenmill.engine.transfer.tier import RUNS_AHEAD, Tier
from tokenmill.startup.assembly.kv_sources import disk_tier, host_tier, session_files

KEY = CacheKey("model")
PAGE_SIZE, PAGE_BYTES = 16, 1 << 19
FEW, MANY = 4, 60
# A page's key, its tokens and their record, with the objects around them.
BYTES_BESIDES = 4096
Save = Callable[[Tier, PageSave], None]


class Pattern:
    """Pages without memory of their own: each byte is the number of its page."""

    page_bytes, layout = PAGE_BYTES, "bytes"

    def __init__(self) -> None:
        self.num_read = self.num_right = 0

    def read(self, page: int, data: memoryview) -> None:
        np.frombuffer(data, dtype=np.uint8)[:] = page
        self.num_read += 1

    def write(self, page: int, data: memoryview) -> None:
        self.num_right += bool((np.frombuffer(data, dtype=np.uint8) == page).all())

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        return write_one_by_one(self, pages, data, checksums)


def saved(tier: Tier, mover: Pattern, tokens: np.ndarray, where: str = "") -> int:
    """Save a prefix; return the most bytes that were allocated at a time meanwhile."""
    done, count = threading.Event(), len(tokens) // PAGE_SIZE
    order = SaveOrder(1, 0, [*range(1, count + 1)], where=where)
    save = PageSave(order, KEY, tokens, Movers(mover), done.set)
    tracemalloc.start()
    try:
        tier.save(save)
        assert done.wait(60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert save.is_saved
    assert mover.num_read == count
    return peak


def loaded(tier: Tier, tokens: np.ndarray) -> int:
    """Load a prefix; return the most bytes that were allocated at a time meanwhile."""
    done, mover, count = threading.Event(), Pattern(), len(tokens) // PAGE_SIZE
    order = LoadOrder(1, "r", tier.name, 0, [*range(1, count + 1)], b"")
    tracemalloc.start()
    try:
        tier.load(PageLoad(order, KEY, tokens, Movers(mover), done.set))
        assert done.wait(60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mover.num_right == count
    return peak


@pytest.mark.parametrize("kind", ["disk", "host", "session"])
def test_the_peak_of_a_save_does_not_grow_with_the_conversation(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    peaks = []
    for count in (FEW, MANY):
        mover, folder = Pattern(), tmp_path / str(count)
        tokens = rng.integers(0, 1000, count * PAGE_SIZE, dtype=np.int32)
        context = SourceContext(mover, PAGE_SIZE, 64, "f")
        limit = MANY * (PAGE_BYTES + 4096)
        tier: Tier
        if kind == "session":
            tier = session_files(context, folder)
        else:
            tier = disk_tier(context, folder, limit) if kind == "disk" else host_tier(context, limit)
        peaks.append(saved(tier, mover, tokens, f"ticket {folder / 'talk'}"))
        if kind == "session":
            form: SessionForm = tier.form  # type: ignore[attr-defined]
            tier.restore(form.read(folder / "talk"))  # type: ignore[attr-defined]
            assert (folder / "talk").stat().st_size > count * PAGE_BYTES
        assert loaded(tier, tokens) < 2 * RUN_BYTES + PAGE_BYTES + count * BYTES_BESIDES
        tier.close()
    few, many = peaks
    assert many < 2 * PAGE_BYTES + MANY * BYTES_BESIDES, "a page and its slot, not the conversation"
    assert many - few < (MANY - FEW) * BYTES_BESIDES


def test_a_disk_fetches_the_runs_that_are_read_next(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    expect, read_pages = SlotFile.expect, SlotFile.read_pages

    def expecting(self: SlotFile, slots: Sequence[Slot]) -> None:
        calls.append(("expected", slots[0].number))
        expect(self, slots)

    def reading(self: SlotFile, slots: Sequence[Slot], data: memoryview) -> int:
        calls.append(("read", slots[0].number))
        return read_pages(self, slots, data)

    tokens = rng.integers(0, 1000, MANY * PAGE_SIZE, dtype=np.int32)
    tier = disk_tier(SourceContext(Pattern(), PAGE_SIZE, 64, "f"), tmp_path, MANY * (PAGE_BYTES + 4096))
    saved(tier, Pattern(), tokens)
    monkeypatch.setattr(SlotFile, "expect", expecting)
    monkeypatch.setattr(SlotFile, "read_pages", reading)
    loaded(tier, tokens)
    tier.close()
    reads = [number for kind, number in calls if kind == "read"]
    assert len(reads) == MANY * PAGE_BYTES // RUN_BYTES
    assert [number for kind, number in calls if kind == "expected"] == reads[1:]
    for place, (kind, number) in enumerate(calls):
        if kind == "expected":
            num_read = sum(kind == "read" for kind, _ in calls[:place])
            assert num_read <= reads.index(number) <= num_read + RUNS_AHEAD
