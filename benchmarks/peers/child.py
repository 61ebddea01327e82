"""A child process with a share of the cores, watched for the memory that it and its own children take."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.1


class Child:
    """Runs a command with `threads` cores.

    Attributes:
        peak: the most memory at one moment, in bytes: `anonymous` of its own, and `resident` with mapped files.
    """

    def __init__(self, command: list[str], threads: int, log: Path, variables: dict[str, str]) -> None:
        self.log = log
        self.peak = {"anonymous": 0, "resident": 0}
        cores = sorted(os.sched_getaffinity(0))[:threads]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
                # So that all of its processes can be ended together.
                start_new_session=True,
            )
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def wait(self, seconds: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs; it has been killed.
        """
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs of it, and stop watching."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._done.set()
        self._watcher.join()

    def tail(self) -> str:
        """The end of what it has written."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def _watch(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_LOOKS):
            sizes = [memory_of(pid) for pid in session_members(self.process.pid)]
            for name in self.peak:
                self.peak[name] = max(self.peak[name], sum(size[name] for size in sizes))


def session_members(session: int) -> list[int]:
    """The processes of a session; what has ended meanwhile is left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The fields after the name, which may hold anything: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                members.append(int(entry.name))
    return members


def memory_of(pid: int) -> dict[str, int]:
    """Bytes that a process has in memory; shared memory counts as its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        lines = []
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "Rss" in name
    }
    own = sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
    return {"anonymous": own, "resident": own + sizes.get("RssFile", 0)}
