"""Keep a small file for each running server of this user on this machine, by which commands find it.

    RUNTIME_FOLDER/PID.json     written once the address is bound, removed at the end

A server that was killed leaves its file behind: the start time of its process tells it from another that got its id,
and whoever reads the folder removes what is stale. Nothing in a file is believed that the process does not show.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.whole_file import whole_file

SUFFIX = ".json"
_START_TIME = 19  # of /proc/PID/stat, counted behind the name in brackets


class RunningServer(msgspec.Struct, kw_only=True, frozen=True):
    """One server.

    Attributes:
        pid: of its first process, which passes signals on.
        started: when that process was started, in ticks since the machine was; 0: unknown on this system.
        since: Unix time at which its address was bound.
        url: where clients find it; `http+unix://PATH` for a socket.
        models: the names of its model in the API.
        source: its model as it was asked for: an absolute path, a hub id, or "" for the bundled demo model.
    """

    pid: int
    started: int
    since: float
    url: str
    models: tuple[str, ...]
    source: str = ""


def runtime_folder(base: str | None) -> Path:
    """Return the folder of the files, private to this user, making it where it is not there.

    Args:
        base: the user's runtime folder, XDG_RUNTIME_DIR; None: a folder in /tmp with the user's id.

    Raises:
        InvalidConfig: it cannot be made, or belongs to somebody else.
    """
    folder = Path(base) / "tokenmill" if base else Path("/tmp") / f"tokenmill-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InvalidConfig(f"{folder} cannot be made: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidConfig(f"{folder} is not a folder of yours alone; remove it, or set XDG_RUNTIME_DIR")
    return folder


@contextlib.contextmanager
def registered(folder: Path, url: str, models: tuple[str, ...], source: str) -> Iterator[None]:
    """Keep a file of this process while the block runs; a disk that takes none costs the entry and nothing else."""
    pid = os.getpid()
    path = folder / f"{pid}{SUFFIX}"
    entry = RunningServer(pid=pid, started=_start_time(pid), since=time.time(), url=url, models=models, source=source)
    try:
        with contextlib.suppress(OSError), whole_file(path, 0o600) as file:
            file.write(msgspec.json.encode(entry))
        yield
    finally:
        if os.getpid() == pid:  # not in what was forked inside
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def running_servers(folder: Path) -> list[RunningServer]:
    """Return the servers that run, the oldest first; files of others, and files that cannot be read, are removed."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=RunningServer)
        except (OSError, msgspec.DecodeError):
            entry = None
        if entry is not None and is_running(entry):
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda entry: entry.since)


def forget_logs(folder: Path, age: float) -> None:
    """Remove logs of servers that nobody has written to for `age` seconds."""
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > age:
                path.unlink()


def is_running(entry: RunningServer) -> bool:
    """Return True while the process of an entry is the one that wrote it."""
    return _is_alive(entry.pid) and _start_time(entry.pid) == entry.started


def memory_of(pid: int) -> int:
    """Return the bytes that a process and its descendants take, shared pages in parts; 0 where Linux does not say."""
    total = 0
    for one in (pid, *_descendants(pid)):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _start_time(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold anything; empty: there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
