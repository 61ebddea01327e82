"""A disk tier for a model with a window group: a prefix is found where its last window is whole."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from tests.startup.assembly.test_kv_tiers import KEY, PAGE_SIZE, SECONDS, SLOT_BYTES, Memory, Tier, fill, tokens_of
from tokenmill.core.transfers import LoadOrder, SaveOrder
from tokenmill.engine.transfer.orders import Movers, PageLoad, PageSave


def test_a_prefix_with_windows_is_found_where_its_last_window_is_whole(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A window of a page and two tokens reaches two pages. A damaged one is no hit, and the next is a shorter one."""
    tier = Tier(tmp_path, 16, windows=Memory(), window=PAGE_SIZE + 2)
    windows, tokens, pages = Memory(), tokens_of(rng, 5), [1, 2, 3, 4, 5]
    movers = Movers(tier.memory, windows=windows)
    fill(tier, rng, pages)
    windows.pages[:] = rng.integers(0, 256, windows.pages.shape, dtype=np.uint8)

    def save(beside: list[tuple[int, int]]) -> None:
        done = threading.Event()
        tier.disk.save(PageSave(SaveOrder(1, 0, pages, windows=beside), KEY, tokens, movers, done.set))
        assert done.wait(SECONDS)

    def load(num_pages: int, beside: list[int]) -> int:
        done = threading.Event()
        order = LoadOrder(1, "r", "disk", 0, list(range(11, 11 + num_pages)), b"", windows=beside)
        loading = PageLoad(order, KEY, tokens[: num_pages * PAGE_SIZE], movers, done.set)
        tier.disk.load(loading)
        assert done.wait(SECONDS)
        return loading.num_filled

    save([(3, 21), (4, 22)])
    assert tier.found(tokens) == 5
    assert tier.found(tokens[: 4 * PAGE_SIZE]) == 0, "a page before the window of the other end is missing"
    assert load(5, [31, 32]) == 5
    assert np.array_equal(windows.pages[[31, 32]], windows.pages[[21, 22]])
    save([(1, 23), (2, 24)])
    assert tier.found(tokens[: 4 * PAGE_SIZE]) == 4
    file = next(tmp_path.glob("*-windows-0.pages"))
    content = bytearray(file.read_bytes())
    content[SLOT_BYTES + 3] ^= 1  # the second that was written: of the last page
    file.write_bytes(content)
    assert load(5, [31, 32]) == 0
    assert tier.found(tokens) == 4
    assert load(4, [33, 34]) == 4
    assert np.array_equal(windows.pages[[33, 34]], windows.pages[[24, 21]])
    tier.disk.close()
