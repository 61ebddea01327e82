"""The real engine process, which dies in any step of a prompt that begins with one token.

python -m tests.serving.server.killing_engine FOLDER INDEX RANK LIFE
"""

import os
import signal
import sys

from tokenmill.ipc.crash_attribution import MarkingExecutor
from tokenmill.startup.assembly.engine_process import main

KILLS = 7


def install() -> None:
    launch = MarkingExecutor.launch

    def launch_or_die(executor, plan):
        outcome = launch(executor, plan)
        if any(row.token_ids[0] == KILLS for row in plan.new_rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    MarkingExecutor.launch = launch_or_die


if __name__ == "__main__":
    install()
    sys.exit(main())
