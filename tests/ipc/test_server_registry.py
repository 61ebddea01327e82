"""The files of running servers: found while their process lives, removed when it does not, and never believed alone."""

import os
import subprocess
import sys

import msgspec
import pytest

from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.server_registry import (
    RunningServer,
    forget_logs,
    memory_of,
    registered,
    running_servers,
    runtime_folder,
)


@pytest.fixture
def folder(tmp_path):
    return runtime_folder(str(tmp_path / "run"))


def write(folder, entry, name=None):
    (folder / f"{name or entry.pid}.json").write_bytes(msgspec.json.encode(entry))


def own_entry(folder):
    with registered(folder, "http://127.0.0.1:1", ("m",), "/models/m"):
        (entry,) = running_servers(folder)
    return entry


def test_a_server_is_found_while_it_runs_and_gone_afterwards(folder):
    entry = own_entry(folder)
    assert (entry.pid, entry.url, entry.models, entry.source) == (
        os.getpid(), "http://127.0.0.1:1", ("m",), "/models/m"
    )  # fmt: skip
    assert running_servers(folder) == []
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_has_left_is_removed(folder):
    entry = own_entry(folder)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(folder, msgspec.structs.replace(entry, pid=ended.pid))
    write(folder, msgspec.structs.replace(entry, started=entry.started + 1), "another-process-with-its-id")
    (folder / "torn.json").write_bytes(b'{"pid": 1')
    (folder / "server-1.log").write_bytes(b"")
    assert running_servers(folder) == []
    assert [path.name for path in folder.iterdir()] == ["server-1.log"]


def test_a_process_that_has_ended_but_was_not_waited_for_does_not_run(folder):
    entry = own_entry(folder)
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    write(folder, msgspec.structs.replace(entry, pid=zombie.pid))
    assert running_servers(folder) == []
    zombie.wait()


def test_the_oldest_comes_first(folder):
    entry = own_entry(folder)
    for name, since in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        write(folder, msgspec.structs.replace(entry, since=since), name)
    assert [one.since for one in running_servers(folder)] == [1.0, 2.0, 3.0]


def test_a_child_leaves_the_file_of_its_parent(folder):
    with registered(folder, "u", ("m",), ""):
        child = os.fork()
        if not child:
            try:
                raise SystemExit
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert len(running_servers(folder)) == 1


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    open_folder = tmp_path / "tokenmill"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(InvalidConfig, match="not a folder of yours alone"):
        runtime_folder(str(tmp_path))
    open_folder.rmdir()
    open_folder.symlink_to(tmp_path)
    with pytest.raises(InvalidConfig, match="XDG_RUNTIME_DIR"):
        runtime_folder(str(tmp_path))


def test_memory_is_that_of_all_processes_of_a_server():
    alone = memory_of(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(64 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        assert memory_of(os.getpid()) > alone + (60 << 20)
        child.communicate(b"\n")


def test_only_old_logs_are_removed(folder):
    for name, age in (("old", 100), ("new", 0)):
        path = folder / f"{name}.log"
        path.write_bytes(b"")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    forget_logs(folder, 50)
    assert [path.name for path in folder.iterdir()] == ["new.log"]


def test_an_entry_travels_whole():
    entry = RunningServer(pid=1, started=2, since=3.0, url="u", models=("a", "b"), source="s")
    assert msgspec.json.decode(msgspec.json.encode(entry), type=RunningServer) == entry
