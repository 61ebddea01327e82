"""Encoder outputs in files: whole or absent, whoever writes, dies or changes them; the least recently used goes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tokenmill.engine.transfer.output_files import (
    OutputFolder,
    OutputMemory,
    OutputStore,
    output_name,
    pack,
    unpack,
)

LIMIT = 100_000
Make = Callable[[int], OutputStore]


@pytest.fixture(params=["folder", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return OutputMemory if request.param == "memory" else lambda limit: OutputFolder(tmp_path, limit)


def let_a_second_pass(folder: Path) -> None:
    """Make all files a second older: what is used next is newer, however coarse or unsteady the system's clock is."""
    for path in folder.iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns - 10**9, status.st_mtime_ns - 10**9))


def packed(rng: np.random.Generator, name: str, count: int = 100) -> bytes:
    return pack(name, "bfloat16", (count, 2), memoryview(rng.bytes(4 * count)))


def test_what_was_packed_is_unpacked(rng: np.random.Generator) -> None:
    numbers = rng.bytes(24)
    found = unpack("n", pack("n", "float32", (3, 2), memoryview(numbers)))
    assert found is not None
    assert (found[0].dtype, found[0].shape, bytes(found[1])) == ("float32", (3, 2), numbers)


def test_any_changed_bit_is_noticed(rng: np.random.Generator) -> None:
    data = packed(rng, "n", 20)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        found = unpack("n", changed)
        # White space and the like may change nothing that is read.
        assert found is None or (found[0], bytes(found[1])) == _whole(data), place
    for length in range(len(data)):
        assert unpack("n", data[:length]) is None
    assert unpack("n", data + b"x") is None
    assert unpack("m", data) is None


def _whole(data: bytes) -> tuple[object, bytes]:
    found = unpack("n", data)
    assert found is not None
    return found[0], bytes(found[1])


def test_names_tell_encoders_and_contents_apart() -> None:
    names = {output_name(whose, digest) for whose in ("a", "b") for digest in ("c", "d")}
    assert len(names) == 4
    assert output_name("a", "c") in names


def test_a_store_has_what_was_written(make: Make, rng: np.random.Generator) -> None:
    store, data = make(LIMIT), packed(rng, "n")
    assert not store.has("n")
    assert store.read("n") is None
    store.write("n", data)
    assert store.has("n")
    assert store.read("n") == data
    store.write("n", data)
    store.remove("n")
    store.remove("n")
    assert not store.has("n")


def test_the_least_recently_used_goes_first(make: Make, tmp_path: Path, rng: np.random.Generator) -> None:
    store, size = make(LIMIT), LIMIT // 4
    for name in "abcd":
        store.write(name, rng.bytes(size))
        let_a_second_pass(tmp_path)
    assert store.has("a")
    let_a_second_pass(tmp_path)
    for name in "ef":
        store.write(name, rng.bytes(size))
        let_a_second_pass(tmp_path)
    assert [name for name in "abcdef" if store.has(name)] == ["a", "d", "e", "f"]


def test_what_is_larger_than_all_room_is_not_kept(make: Make, rng: np.random.Generator) -> None:
    store = make(LIMIT)
    store.write("a", rng.bytes(10))
    store.write("b", rng.bytes(LIMIT + 1))
    assert (store.has("a"), store.has("b")) == (True, False)


def test_what_a_killed_writer_leaves_is_not_seen_and_goes(tmp_path: Path, rng: np.random.Generator) -> None:
    child = os.fork()
    if not child:
        try:
            descriptor = os.open(tmp_path / ".a.output.0123", os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(descriptor, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    store, left = OutputFolder(tmp_path, LIMIT), tmp_path / ".a.output.0123"
    assert not store.has("a")
    store.write("b", rng.bytes(10))
    assert left.exists(), "another writer may be at it"
    os.utime(left, (time.time() - 3600,) * 2)
    store.write("c", rng.bytes(10))
    assert not left.exists()
    assert store.has("b")


def test_many_writers_and_readers_never_see_half_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    contents = {f"{number:032x}": packed(rng, f"{number:032x}", 2000) for number in range(8)}
    limit = 5 * len(contents[f"{0:032x}"])  # not all at once
    wrong: list[str] = []
    ends = threading.Event()

    def work(seed: int) -> None:
        own, store = np.random.default_rng(seed), OutputFolder(tmp_path, limit)
        while not ends.is_set():
            name = list(contents)[int(own.integers(8))]
            if own.random() < 0.5:
                store.write(name, contents[name])
            elif (data := store.read(name)) is not None and data != contents[name]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(int(seed),)) for seed in rng.integers(1 << 30, size=4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong
    store = OutputFolder(tmp_path, limit)
    store.write(f"{0:032x}", contents[f"{0:032x}"])
    assert sum(path.stat().st_size for path in tmp_path.glob("*.output")) <= limit
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(PermissionError, match="this user alone"):
        OutputFolder(tmp_path, LIMIT)


def test_pipes_and_links_to_nowhere_are_not_there(tmp_path: Path) -> None:
    store = OutputFolder(tmp_path, LIMIT)
    os.mkfifo(tmp_path / "a.output")
    (tmp_path / "b.output").symlink_to(tmp_path / "nothing")
    assert store.read("a") is None
    assert store.read("b") is None
