"""Run the server of one model of several: `python -m tokenmill.serving.models.child DESCRIPTOR PARENT`.

Its configs come on standard input, its reports go to the descriptor. It ends when it is told to (SIGTERM), and when its
parent is gone; the last one then takes the parent's folder away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import msgspec

from tokenmill.ipc.log_lines import logged
from tokenmill.serving.models.reports import Launch, ReportingScreen
from tokenmill.serving.server.process import launch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Serve until told to end; return the exit code."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    _end_with(parent)
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    # By its folder the parent knows the processes that a server which was killed has left behind.
    tempfile.tempdir = given.folder
    with logged():
        code = launch.run(given.engine, given.server, partial(ReportingScreen, descriptor), is_restarted_elsewhere=True)
    if os.getppid() != parent:
        shutil.rmtree(Path(given.folder).parent, ignore_errors=True)
    return code


def _end_with(parent: int) -> None:
    """Let the system send SIGTERM when the parent dies, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
