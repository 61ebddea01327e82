"""The ranks of an offline engine: processes that rank 0 starts, and that end with it."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed
from tokenmill.ipc.python_child import start_python

MODULE = "tokenmill.startup.assembly.rank_process"
# How long they get to end by themselves.
_END_SECONDS = 5.0


class RankChildren:
    """The ranks of one engine that this process starts: all but rank 0, or those of its machine.

    Each has one end of a pipe as its standard input: when this process is gone, however it ended, they end too.

    Attributes:
        rendezvous: the file in which rank 0 notes where the memory is.
    """

    def __init__(self, config: EngineConfig, ranks: Iterable[int]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-ranks-"))
        self.rendezvous = self._folder / "engine.ranks"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in ranks:
                self._start(dataclasses.replace(config, rank=rank, rendezvous=str(self.rendezvous)))
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig) -> None:
        path = self._folder / f"rank-{config.rank}.json"
        path.write_bytes(msgspec.json.encode(config))
        arguments = ["-m", MODULE, str(path)]
        self._processes[config.rank] = start_python(arguments, {"OMP_WAIT_POLICY": "PASSIVE"}, stdin=subprocess.PIPE)

    def check(self) -> None:
        """Check that all ranks are alive.

        Raises:
            EngineFailed: a rank has ended.
        """
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise EngineFailed(f"rank {rank} has ended with exit code {code} before it was ready")

    def close(self) -> None:
        """End the ranks, by force if need be."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self.forget_folder()

    def forget_folder(self) -> None:
        """Remove the folder in which the ranks find each other."""
        shutil.rmtree(self._folder, ignore_errors=True)
