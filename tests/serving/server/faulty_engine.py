"""The real engine process, which crashes when a signal tells it to: a native kernel reads where there is nothing.

python -m tests.serving.server.faulty_engine FOLDER INDEX RANK LIFE
"""

import signal
import sys

from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.engine_process import main

CRASH = signal.SIGUSR2
NOWHERE = 64  # no process has memory there


def crash(*_: object) -> None:
    kernels = load_kernels(1)
    assert kernels is not None, "the test is of native kernels"
    kernels.rms_norm(NOWHERE, 64, 0, 64, 1.0, NOWHERE, False, 1e-6, NOWHERE, 1, 64)


if __name__ == "__main__":
    signal.signal(CRASH, crash)
    sys.exit(main())
