"""A file of packed weights: what is damaged or not ours is never used, and of several writers one writes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full_disk import room_for
from tests.model.weights.starts import ALONE, MAPPED, PACKED, Start
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights import packed_file
from tokenmill.model.weights.loader import ModelPlan
from tokenmill.model.weights.packed_file import HEADER_BYTES, PackedFile
from tokenmill.model.weights.sharing import content_of, load_weights

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")


def truncate(file: Path, rng: np.random.Generator) -> None:
    os.truncate(file, int(rng.integers(1, file.stat().st_size)))


def lengthen(file: Path, rng: np.random.Generator) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def flip_a_bit(file: Path, rng: np.random.Generator) -> None:
    flip(file, HEADER_BYTES + int(rng.integers(file.stat().st_size - HEADER_BYTES)), rng)


def flip_a_bit_of_the_header(file: Path, rng: np.random.Generator) -> None:
    flip(file, int(rng.integers(file.read_bytes()[:4096].rstrip(b"\0").__len__())), rng)


def flip(file: Path, place: int, rng: np.random.Generator) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << int(rng.integers(8))]))


def exchange_rows(file: Path, rng: np.random.Generator) -> None:
    """Two cache lines, which have the same sum in any order."""
    content = bytearray(file.read_bytes())
    one, other = slice(HEADER_BYTES, HEADER_BYTES + 64), slice(HEADER_BYTES + 64, HEADER_BYTES + 128)
    content[one], content[other] = content[other], content[one]
    file.write_bytes(content)


def forget_the_header(file: Path, rng: np.random.Generator) -> None:
    """As a writer leaves it that is killed."""
    with file.open("r+b") as opened:
        opened.write(bytes(4096))


def swell_the_header(file: Path, rng: np.random.Generator) -> None:
    with file.open("r+b") as opened:
        opened.write(b"[" * 4096)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lengthen,
        flip_a_bit,
        flip_a_bit_of_the_header,
        exchange_rows,
        forget_the_header,
        swell_the_header,
    ],
)
def test_what_is_damaged_is_packed_anew(
    damage: Any, start: Start, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    start.load()
    whole = start.file.read_bytes()
    damage(start.file, rng)
    assert start.file.read_bytes() != whole
    assert start.load().source.startswith(PACKED)
    assert "is incomplete or damaged" in caplog.text
    assert start.file.read_bytes() == whole
    assert start.load().source == MAPPED


def test_what_is_damaged_while_it_is_used_is_left_alone(start: Start, rng: np.random.Generator) -> None:
    used = start.load()
    flip_a_bit(start.file, rng)
    damaged = start.file.read_bytes()
    assert start.load().source.startswith(ALONE)
    assert start.file.read_bytes() == damaged
    assert used.source.startswith(PACKED)


def as_link(file: Path, away: Path) -> None:
    file.rename(away)
    file.symlink_to(away)


def as_pipe(file: Path, away: Path) -> None:
    file.rename(away)
    os.mkfifo(file, 0o600)


def of_another_user(file: Path, away: Path) -> None:
    os.link(file, away)
    os.chown(file, 12345, -1)


def open_to_others(file: Path, away: Path) -> None:
    os.link(file, away)
    file.chmod(0o620)


@pytest.mark.parametrize("change", [as_link, as_pipe, of_another_user, open_to_others])
def test_what_is_not_ours_alone_is_removed_and_never_opened(
    change: Any, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if change is of_another_user and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    start.load()
    away = tmp_path / "away"
    whole = start.file.read_bytes()
    change(start.file, away)
    assert start.load().source.startswith(PACKED)
    assert "is no file of this user alone" in caplog.text
    status = start.file.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)
    assert status.st_ino != away.stat().st_ino
    assert away.read_bytes() == whole


def test_of_two_that_start_at_once_one_packs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held up in its packing until the second waits for it."""
    waits, is_packing, load = threading.Event(), threading.Event(), ModelPlan.load
    packs: list[ModelPlan] = []

    def slowly(plan: ModelPlan, *arguments: Any) -> Decoder:
        packs.append(plan)
        is_packing.set()
        assert waits.wait(30)
        return load(plan, *arguments)

    def second() -> None:
        assert is_packing.wait(30)
        config = EngineConfig(weight_cache_dir=str(start.cache))
        sources.append(load_weights(start.plan(), start.model, config, lambda done, total: waits.set()).source)

    monkeypatch.setattr(ModelPlan, "load", slowly)
    sources: list[str] = []
    thread = threading.Thread(target=second)
    thread.start()
    sources.append(start.load().source)
    thread.join(30)
    assert len(packs) == 1
    assert sorted(source[:6] for source in sources) == ["mapped", "packed"]


def test_who_waits_too_long_packs_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.load()
    file = PackedFile(start.file, content_of(start.plan(), start.model))
    assert file.lock(fcntl.LOCK_EX)
    monkeypatch.setattr(packed_file, "PATIENCE", 0.0)
    assert start.load().source.startswith(ALONE)
    file.close()
    monkeypatch.undo()
    assert start.load().source == MAPPED


def test_a_full_disk_leaves_nothing_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert start.load().source.startswith(ALONE)
    assert start.file.stat().st_size == 0
    monkeypatch.undo()
    assert start.load().source.startswith(PACKED)


def test_at_any_byte_a_full_disk_leaves_nothing_behind(start: Start) -> None:
    start.load()
    size = start.file.stat().st_size
    for _ in range(3):
        start.file.unlink()
        with room_for(random.randrange(size)):
            assert start.load().source.startswith(ALONE)
        assert start.file.stat().st_size == 0
        assert start.load().source.startswith(PACKED)


PSS = """
import sys
from pathlib import Path
from tokenmill.model.weights.packed_file import Claim, Content, claim
file, found = claim(Path(sys.argv[1]), Content(sys.argv[2], int(sys.argv[3])), print)
assert found is Claim.WHOLE
memory = file.map()
memory.sum()
print("mapped", flush=True)
sys.stdin.readline()
about, pss = "", 0
for line in open("/proc/self/smaps"):
    about = line if "-" in line.split()[0] else about
    pss += int(line.split()[1]) * 1024 if line.startswith("Pss:") and sys.argv[1] in about else 0
print(pss, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_processes_hold_one_copy(start: Start) -> None:
    start.load()
    content = content_of(start.plan(), start.model)
    command = [sys.executable, "-c", PSS, str(start.file), content.key, str(content.num_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "mapped\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        held = sum(int(process.stdout.readline()) for process in processes)
        assert 0 < held <= 1.2 * (HEADER_BYTES + content.num_bytes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
