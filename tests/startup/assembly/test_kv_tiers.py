"""The tiers: what was stored is found again, whatever has happened to the files; what is damaged is a miss."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.full_disk import room_for
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.request import CacheKey
from tokenmill.core.transfers import KVQuery, LoadOrder, SaveOrder
from tokenmill.engine.transfer.orders import Movers, PageLoad, PageSave, write_one_by_one
from tokenmill.engine.transfer.protocol import SourceContext
from tokenmill.startup.assembly.kv_sources import disk_tier, disk_tiers, host_tier

PAGE_SIZE, PAGE_BYTES, SLOT_BYTES = 4, 5000, 8192
KEY = CacheKey("model", "")
SECONDS = 30.0


class Memory:
    """Pages that are byte strings."""

    def __init__(self, num_pages: int = 64) -> None:
        self.pages = np.zeros((num_pages, PAGE_BYTES), dtype=np.uint8)
        self.page_bytes = PAGE_BYTES
        self.layout = "bytes"

    def read(self, page: int, data: memoryview) -> None:
        data[:] = self.pages[page].tobytes()

    def write(self, page: int, data: memoryview) -> None:
        self.pages[page] = np.frombuffer(data, dtype=np.uint8)

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        return write_one_by_one(self, pages, data, checksums)


class Tier:
    """A disk tier over a memory of its own, one order at a time."""

    def __init__(self, folder: Path, num_slots: int = 8, fingerprint: str = "f", **context: Any) -> None:
        self.memory = Memory()
        made = SourceContext(self.memory, PAGE_SIZE, 64, fingerprint, **context)
        self.disk = disk_tier(made, folder, num_slots * SLOT_BYTES)

    def found(self, tokens: np.ndarray, key: CacheKey = KEY) -> int:
        """Pages of a prompt that are there."""
        answer = eventually(lambda: self.disk.lookup(KVQuery("r", key, tokens, 0), None))
        return answer.num_tokens // PAGE_SIZE

    def save(self, tokens: np.ndarray, pages: list[int], first: int = 0, key: CacheKey = KEY) -> bool:
        done = threading.Event()
        save = PageSave(SaveOrder(1, first, pages), key, tokens, Movers(self.memory), done.set)
        self.disk.save(save)
        assert done.wait(SECONDS)
        return save.is_saved

    def load(self, tokens: np.ndarray, pages: list[int], first: int = 0, key: CacheKey = KEY) -> int:
        done = threading.Event()
        load = PageLoad(LoadOrder(1, "r", "disk", first, pages, b""), key, tokens, Movers(self.memory), done.set)
        self.disk.load(load)
        assert done.wait(SECONDS)
        return load.num_filled


def tokens_of(rng: np.random.Generator, num_pages: int) -> np.ndarray:
    return rng.integers(0, 1000, num_pages * PAGE_SIZE, dtype=np.int32)


def fill(tier: Tier, rng: np.random.Generator, pages: list[int]) -> np.ndarray:
    tier.memory.pages[pages] = rng.integers(0, 256, (len(pages), PAGE_BYTES), dtype=np.uint8)
    return tier.memory.pages[pages].copy()


def pages_file(folder: Path) -> Path:
    return next(folder.glob("*.pages"))


def index_file(folder: Path) -> Path:
    return next(folder.glob("*.index"))


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_was_stored_is_there_after_a_restart_and_after_a_kill(
    tmp_path: Path, rng: np.random.Generator, is_closed: bool
) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 3)
    content = fill(tier, rng, [1, 2, 3])
    assert tier.save(tokens, [1, 2, 3])
    if is_closed:
        tier.disk.close()
    else:
        tier.disk._pages.store.close()  # what a kill leaves: nothing is written at the end
    again = Tier(tmp_path)
    assert again.found(tokens) == 3
    assert again.load(tokens, [9, 8, 7]) == 3
    assert np.array_equal(again.memory.pages[[9, 8, 7]], content)
    again.disk.close()


def test_a_prefix_is_found_as_far_as_it_is_the_same_and_only_by_who_shares_its_key(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 3)
    fill(tier, rng, [1, 2, 3])
    tier.save(tokens, [1, 2, 3])
    other = tokens.copy()
    other[PAGE_SIZE + 1] += 1
    assert tier.found(other) == 1
    assert tier.found(tokens[: 2 * PAGE_SIZE + 3]) == 2
    assert tier.found(tokens[PAGE_SIZE:]) == 0, "a page is found behind the same pages only"
    assert tier.found(tokens, CacheKey("model", "salt")) == 0
    assert tier.found(tokens, CacheKey("mode", "l")) == 0
    tier.disk.close()
    stranger = Tier(tmp_path, fingerprint="g")
    assert stranger.found(tokens) == 0
    stranger.disk.close()


def test_pages_in_the_middle_are_stored_and_loaded_by_their_place(tmp_path: Path, rng: np.random.Generator) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 4)
    content = fill(tier, rng, [1, 2, 3, 4])
    assert tier.save(tokens[: 2 * PAGE_SIZE], [1, 2])
    assert tier.save(tokens, [3, 4], first=2)
    assert tier.load(tokens, [11, 12], first=2) == 2
    assert np.array_equal(tier.memory.pages[[11, 12]], content[2:])
    tier.disk.close()


@pytest.mark.parametrize("what", ["page", "record", "cut page", "cut index", "header"])
def test_what_is_torn_or_damaged_is_a_miss_and_never_a_wrong_page(
    tmp_path: Path, rng: np.random.Generator, what: str
) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 3)
    content = fill(tier, rng, [1, 2, 3])
    tier.save(tokens, [1, 2, 3])
    number = tier.disk._pages._slots[next(iter(tier.disk._pages._slots))].number
    tier.disk.close()
    pages, index = pages_file(tmp_path), index_file(tmp_path)
    if what == "page":
        with pages.open("r+b") as file:
            file.seek(number * SLOT_BYTES + int(rng.integers(PAGE_BYTES)))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    elif what == "cut page":
        os.truncate(pages, number * SLOT_BYTES + PAGE_BYTES // 2)
    elif what == "cut index":
        os.truncate(index, index.stat().st_size - 3)
    else:
        data = bytearray(index.read_bytes())
        start = data.index(b"\n") + 1
        data[3 if what == "header" else int(rng.integers(start, len(data)))] ^= 1
        index.write_bytes(data)
    again = Tier(tmp_path)
    num_loaded = again.load(tokens, [7, 8, 9])
    assert num_loaded < 3
    assert np.array_equal(again.memory.pages[[7, 8, 9][:num_loaded]], content[:num_loaded])
    assert again.found(tokens) == num_loaded, "it is told of no more from now on"
    fill(again, rng, [1, 2, 3])
    assert again.save(tokens, [1, 2, 3]), "and may be stored anew"
    assert again.load(tokens, [4, 5, 6]) == 3
    again.disk.close()


def test_the_pages_used_least_recently_make_room_tails_first(tmp_path: Path, rng: np.random.Generator) -> None:
    tier = Tier(tmp_path, num_slots=6)
    first, second, third = (tokens_of(rng, 3) for _ in range(3))
    for tokens in (first, second):
        fill(tier, rng, [1, 2, 3])
        assert tier.save(tokens, [1, 2, 3])
    assert tier.load(first, [4, 5, 6]) == 3
    assert tier.save(third[: 2 * PAGE_SIZE], [1, 2])
    assert [tier.found(tokens) for tokens in (first, second, third)] == [3, 1, 2]
    tier.disk.close()
    again = Tier(tmp_path, num_slots=6)
    assert [again.found(tokens) for tokens in (first, second, third)] == [3, 1, 2]
    assert again.save(tokens_of(rng, 1), [1])
    assert [again.found(tokens) for tokens in (first, second, third)] == [3, 0, 2], "the order of use was kept"
    again.disk.close()


def test_a_prefix_larger_than_the_tier_is_stored_as_far_as_it_fits(tmp_path: Path, rng: np.random.Generator) -> None:
    tier, tokens = Tier(tmp_path, num_slots=3), tokens_of(rng, 5)
    fill(tier, rng, [1, 2, 3, 4, 5])
    assert tier.save(tokens, [1, 2, 3, 4, 5])
    assert tier.found(tokens) == 3
    tier.disk.close()


def test_files_are_this_users_alone_and_one_engine_at_a_time_writes_them(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "new").iterdir())
    Tier(tmp_path / "new").disk.close()
    assert sorted(path.name[-7:] for path in (tmp_path / "new").glob("*.pages")) == ["0.pages", "1.pages"]
    tier.disk.close()
    for path in (tmp_path / "new").glob("*.pages"):
        path.chmod(0o644)
    with pytest.raises(InvalidConfig, match="not a file of this user alone"):
        Tier(tmp_path / "new")


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    Tier(tmp_path).disk.close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = pages_file(tmp_path)
    path.unlink()
    path.symlink_to(victim)
    with pytest.raises(InvalidConfig):
        Tier(tmp_path)
    assert victim.read_bytes() == b"precious"


def test_a_limit_that_holds_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="hold no page"):
        Tier(tmp_path, num_slots=0)


def test_a_disk_that_is_full_at_a_restart_costs_the_tier_and_not_the_engine(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 5 * 8 * SLOT_BYTES
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    context = SourceContext(Memory(), PAGE_SIZE, 64, "f")
    (tier,) = disk_tiers(context, tmp_path, None)
    num_slots = tier.num_slots
    tier.close()
    # What the tier has taken itself counts as room.
    taken = rng.integers(1, 8) * SLOT_BYTES
    next(tmp_path.glob("kv-*.pages")).write_bytes(rng.bytes(taken))
    free -= taken
    (tier,) = disk_tiers(context, tmp_path, None)
    assert tier.num_slots == num_slots
    tier.close()
    for path in tmp_path.iterdir():
        path.unlink()
    free = 100
    assert disk_tiers(context, tmp_path, None) == []
    assert "bytes hold no page" in caplog.text
    with pytest.raises(InvalidConfig, match="100 bytes hold no page"):
        disk_tiers(context, tmp_path, 100)


def test_a_full_disk_ends_storing_and_nothing_else(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, tokens, others = Tier(tmp_path), tokens_of(rng, 2), tokens_of(rng, 2)
    content = fill(tier, rng, [1, 2])
    assert tier.save(tokens, [1, 2])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.engine.transfer.slot_file.os.pwrite", full)
        assert not tier.save(others, [3, 4])
    assert "No space left on device" in caplog.text
    assert tier.found(others) == 0
    assert tier.load(tokens, [5, 6]) == 2
    assert np.array_equal(tier.memory.pages[[5, 6]], content)
    tier.disk.close()


def test_at_any_byte_a_full_disk_leaves_what_was_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    for number in range(12):
        folder, (first, second) = tmp_path / str(number), (tokens_of(rng, 2), tokens_of(rng, 3))
        tier = Tier(folder)
        content = fill(tier, rng, [1, 2, 3])
        assert tier.save(first, [1, 2])
        sizes = {path.suffix: path.stat().st_size for path in folder.iterdir()}
        # Either of the two files is the first that takes nothing more.
        most = sizes[".index"] + 400 if number % 2 else 8 * SLOT_BYTES
        with room_for(int(rng.integers(most))):
            is_saved = tier.save(second, [1, 2, 3])
            tier.disk.close()
        again = Tier(folder)
        assert sorted(path.suffix for path in folder.iterdir()) == [".index", ".pages"]
        assert again.found(first) == 2
        assert not is_saved or again.found(second) == 3
        for tokens in (first, second):
            found = again.load(tokens, [5, 6, 7])
            assert found == again.found(tokens)
            assert np.array_equal(again.memory.pages[5 : 5 + found], content[:found])
        assert again.save(tokens_of(rng, 1), [1]), "there is room again"
        again.disk.close()


def test_a_load_or_a_save_that_was_taken_back_touches_no_page(tmp_path: Path, rng: np.random.Generator) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 2)
    fill(tier, rng, [1, 2])
    tier.save(tokens, [1, 2])
    load = PageLoad(LoadOrder(1, "r", "disk", 0, [5, 6], b""), KEY, tokens, Movers(tier.memory), lambda: None)
    save = PageSave(SaveOrder(2, 0, [1, 2]), KEY, tokens_of(rng, 2), Movers(tier.memory), lambda: None)
    load.cancel()
    save.cancel()
    tier.disk.load(load)
    tier.disk.save(save)
    tier.save(tokens_of(rng, 1), [3])  # behind both
    assert not tier.memory.pages[[5, 6]].any()
    assert tier.disk.num_pages == 3
    tier.disk.close()


def test_a_reset_forgets_all_for_good(tmp_path: Path, rng: np.random.Generator) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 2)
    fill(tier, rng, [1, 2])
    tier.save(tokens, [1, 2])
    tier.disk.reset()
    assert tier.found(tokens) == 0
    tier.disk._pages.store.close()
    again = Tier(tmp_path)
    assert again.found(tokens) == 0
    again.disk.close()


def test_an_index_that_has_grown_is_begun_anew(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.engine.transfer.slot_table.LEAST_RECORDS", 10)
    tier = Tier(tmp_path, num_slots=2)
    for _ in range(30):
        fill(tier, rng, [1])
        tokens = tokens_of(rng, 1)
        assert tier.save(tokens, [1])
    assert index_file(tmp_path).stat().st_size < 20 * 50 + 200
    assert tier.found(tokens) == 1
    tier.disk._pages.store.close()
    again = Tier(tmp_path, num_slots=2)
    assert again.load(tokens, [5]) == 1
    again.disk.close()


def test_the_tier_in_memory_stores_and_makes_room_as_the_disk_does(tmp_path: Path, rng: np.random.Generator) -> None:
    tier = Tier(tmp_path)
    tier.disk.close()
    tier.disk = host_tier(SourceContext(tier.memory, PAGE_SIZE, 64, "f"), 4 * PAGE_BYTES)
    first, second = tokens_of(rng, 3), tokens_of(rng, 2)
    content = fill(tier, rng, [1, 2, 3])
    assert tier.save(first, [1, 2, 3])
    assert tier.load(first, [7, 8, 9]) == 3
    assert np.array_equal(tier.memory.pages[[7, 8, 9]], content)
    assert tier.save(second, [4, 5])
    assert (tier.found(first), tier.found(second)) == (2, 2)
    tier.disk.reset()
    assert tier.found(first) == 0
    tier.disk.close()
    with pytest.raises(InvalidConfig, match="--kv-host-size"):
        host_tier(SourceContext(tier.memory, PAGE_SIZE, 64, "f"), PAGE_BYTES - 1)


def test_a_disk_that_hangs_finds_nothing_any_more_until_it_goes_on(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, tokens = Tier(tmp_path), tokens_of(rng, 2)
    fill(tier, rng, [1, 2])
    tier.save(tokens, [1, 2])
    reading, go_on = threading.Event(), threading.Event()
    read = tier.disk._pages.store.read_pages

    def hang(*arguments: Any) -> int:
        reading.set()
        assert go_on.wait(SECONDS)
        return read(*arguments)

    monkeypatch.setattr(tier.disk._pages.store, "read_pages", hang)
    load = PageLoad(LoadOrder(1, "r", "disk", 0, [5, 6], b""), KEY, tokens, Movers(tier.memory), lambda: None)
    tier.disk.load(load)
    assert reading.wait(SECONDS)
    assert tier.found(tokens) == 2, "it may take its time"
    load.cancel()
    assert tier.found(tokens) == 0, "the engine has given it up"
    monkeypatch.setattr("tokenmill.engine.transfer.tier.CLOSE_SECONDS", 0.01)
    tier.disk.close()
    go_on.set()
    tier.disk._thread.join(SECONDS)
    tier.disk._pages.store.close()
    assert not tier.memory.pages[[5, 6]].any()
