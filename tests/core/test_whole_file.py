"""A file is there as a whole, or what was there before it is: at whichever byte the disk is full."""

import io
import os
import random
import threading

import pytest

from tests.full_disk import contents, room_for
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.errors import DiskFull
from tokenmill.core.whole_file import whole_file, write_whole
from tokenmill.ipc.crash_attribution import PAGE_BYTES, RunningPage, running_at_death
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.lab.bench.samples import write_samples


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def in_pieces(path, data):
    with whole_file(path) as file:
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])


def as_text(path, data):
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="latin-1", newline="") as file:
        file.write(data.decode("latin-1"))


@pytest.mark.parametrize("write", [write_whole, in_pieces, as_text])
@pytest.mark.parametrize("before", [b"what was there", None])
def test_at_any_byte_a_full_disk_leaves_what_was_there(tmp_path, rng, write, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    kept = contents(tmp_path)
    for _ in range(50):
        data = rng.randbytes(rng.choice((1, rng.randrange(1, 9000), rng.randrange(1, 100_000))))
        with room_for(rng.randrange(len(data))), pytest.raises(OSError) as refused:  # noqa: PT011
            write(path, data)
        assert refused.value.filename == str(path)
        assert contents(tmp_path) == kept
        write(path, data)
        assert contents(tmp_path) == {"file": data}
        kept = contents(tmp_path)


def test_a_failure_of_ones_own_leaves_nothing_and_a_link_stays_a_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("file")
    with pytest.raises(TypeError), whole_file(link) as file:
        file.writelines([b"half", 0])
    assert contents(tmp_path) == {}
    write_whole(link, b"whole")
    assert link.is_symlink()
    assert contents(tmp_path)["file"] == b"whole"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    heard = []
    thread = threading.Thread(target=lambda: heard.append(path.read_bytes()), daemon=True)
    thread.start()
    write_whole(path, b"data")
    thread.join(30)
    assert heard == [b"data"]
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["samples.csv", "samples.jsonl"])
def test_samples_are_whole_or_not_there(tmp_path, rng, name):
    samples = [{"step": number, "seconds": rng.random(), "gaps": [rng.random()]} for number in range(200)]
    write_samples(str(tmp_path / name), samples)
    whole = contents(tmp_path)
    others = [*samples[:-1], {**samples[-1], "step": 200}]  # of the same length
    for _ in range(20):
        with room_for(rng.randrange(len(whole[name]))), pytest.raises(OSError, match=name):
            write_samples(str(tmp_path / name), others)
        assert contents(tmp_path) == whole


def test_the_launch_file_of_a_running_server_is_never_torn(tmp_path, rng):
    first = LaunchFile(EngineConfig(model="first"), ServerConfig())
    first.write(tmp_path)
    size = (tmp_path / "launch.json").stat().st_size
    for _ in range(20):
        with room_for(rng.randrange(size)), pytest.raises(DiskFull, match="set TMPDIR"):
            LaunchFile(EngineConfig(model="second"), ServerConfig()).write(tmp_path)
        assert LaunchFile.read(tmp_path) == first, "parts that die now are started again from it"
        assert len(contents(tmp_path)) == 1


def test_an_engine_without_room_for_its_page_lives_and_nobody_is_suspected(tmp_path, rng):
    path = tmp_path / "engine.running"
    with room_for(rng.randrange(PAGE_BYTES)):
        page = RunningPage(path)
    page.write(["a", "b"])
    assert running_at_death(path) == []
    assert contents(tmp_path) == {}
    RunningPage(path).write(["a", "b"])
    assert running_at_death(path) == ["a", "b"]
