"""Run the server of one model of several: `python -m tokenmill.serving.models.child FOLDER DESCRIPTOR PARENT`.

It loads its code and starts an engine that does so, too, before it is told which model to serve: on its standard input,
where configs come as JSON. Its reports go to the descriptor. It ends when it is told to (SIGTERM), and when its parent
is gone; the last one then takes the parent's folder away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from tokenmill.ipc.log_lines import logged
from tokenmill.serving.models.reports import Launch, ReportingScreen
from tokenmill.serving.replicas.starter import Starter

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What a server needs that is imported late elsewhere.
_CODE = (
    "tokenmill.serving.server.process.first_process",
    "tokenmill.serving.server.app",
    "tokenmill.serving.frontend.worker",
    "uvicorn.protocols.http.httptools_impl",
)


def main() -> int:
    """Serve until told to end; return the exit code."""
    folder, descriptor, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(descriptor, False)
    _end_with(parent)
    with logged():
        starter = Starter()
        starter.start_spare(folder)
        for name in _CODE:
            import_module(name)
        from tokenmill.serving.server.process.launch import run_watched

        given = sys.stdin.buffer.read()
        code = 0
        if given:
            launch = msgspec.json.decode(given, type=Launch)
            screen = partial(ReportingScreen, descriptor)
            code = run_watched(launch.engine, launch.server, screen, folder, starter)
    if os.getppid() != parent:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return code


def _end_with(parent: int) -> None:
    """Let the system send SIGTERM when the parent dies, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
