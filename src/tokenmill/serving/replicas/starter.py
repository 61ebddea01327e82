"""`Starter`: starts the processes of a server's parts, at first as copies of a process that has imported `SHARED`.

What an engine computes with takes most of a start to load: one that begins early loads beside this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Self

from tokenmill.ipc.channels import engine_name, worker_name
from tokenmill.ipc.python_child import fork_python, start_python
from tokenmill.ipc.topology import Topology

ENGINE_MODULE = "tokenmill.startup.assembly.engine_process"
WORKER_MODULE = "tokenmill.serving.frontend.worker"
# What an engine that was started before its launch file waits for on its standard input.
GO = b"\n"
_PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
# The engine shares the cores with the other processes. Threads that spin while they wait for the next matrix product
# take those away: on 2 busy cores a step was 27 times slower.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
# What every part imports, and what takes longest to.
SHARED = (
    "asyncio",
    "numpy",
    "setproctitle",
    "zmq",
    "tokenmill.core.engine_messages",
    "tokenmill.core.messages",
    "tokenmill.core.part_messages",
    "tokenmill.ipc.heartbeat",
)


def import_shared() -> None:
    """Import what the parts share, once for all of them: call it before this process forks."""
    # NumPy's products are small; a thread that OpenBLAS starts would be one too many to fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in SHARED:
        import_module(name)
    gc.freeze()  # a collection that writes to what is shared would copy it


class Starter:
    """Starts processes, and keeps those started early until they are requested.

    Attributes:
        engine_module: the module that runs as the process of an engine. worker_module: of a text worker.
    """

    def __init__(self, engine_module: str = ENGINE_MODULE, worker_module: str = WORKER_MODULE) -> None:
        self.engine_module = engine_module
        self.worker_module = worker_module
        self._early: dict[str, subprocess.Popen[bytes]] = {}
        self._spare: subprocess.Popen[bytes] | None = None

    def start_spare(self, folder: Path) -> None:
        """Start engine 0 before it is known what it will run: it loads its code, and waits until `begun`."""
        self._spare = self._start(self.engine_module, folder, ("0", "0"), 0)

    @contextlib.contextmanager
    def begun(self, folder: Path, topology: Topology) -> Iterator[Self]:
        """Start all parts that are processes, once the launch file is there; at the end, kill unused ones."""
        if self._spare is not None:
            assert self._spare.stdin is not None, "each part has a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has died, which its watcher will find
                self._spare.stdin.write(GO)
                self._spare.stdin.flush()
            self._early[engine_name(0)] = self._spare
        for spec in topology.engines:
            for rank in range(spec.num_ranks):
                arguments = (str(spec.index), str(rank))
                if (name := engine_name(spec.index, rank)) not in self._early:
                    self._early[name] = self._fork(self.engine_module, folder, arguments)
        for index in topology.workers if topology.tokenizer_workers else ():
            self._early[worker_name(index)] = self._fork(self.worker_module, folder, (str(index),))
        try:
            yield self
        finally:
            for process in self._early.values():
                process.kill()
                process.wait()

    def start(
        self, name: str, module: str, folder: Path, arguments: Sequence[str], life: int
    ) -> subprocess.Popen[bytes]:
        """Return a part's process in this life: the one started early under its first inbox's name, or a new one."""
        early = None if life else self._early.pop(name, None)
        return early or self._start(module, folder, arguments, life)

    def _fork(self, module: str, folder: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return fork_python(module, [str(folder), *arguments, "0"], _ENVIRONMENT, **_PIPES)

    def _start(self, module: str, folder: Path, arguments: Sequence[str], life: int) -> subprocess.Popen[bytes]:
        return start_python(["-m", module, str(folder), *arguments, str(life)], _ENVIRONMENT, **_PIPES)
