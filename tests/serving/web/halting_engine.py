"""The real engine process, which stands still (SIGSTOP) in the middle of the next answer when a signal asks for it.

python -m tests.serving.web.halting_engine FOLDER INDEX RANK LIFE
"""

import os
import signal
import sys

from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.engine_process import main

HALT = signal.SIGUSR2
# Enough to be seen, and far from the whole answer.
NUM_TOKENS = 16


class HaltingEngine:
    def __init__(self) -> None:
        self.num_left = 0
        self.step = Engine.step

    def install(self) -> None:
        def ask(*_: object) -> None:
            self.num_left = NUM_TOKENS

        def step(engine):
            outputs = self.step(engine)
            self.count(sum(len(output.token_ids) for output in outputs))
            return outputs

        signal.signal(HALT, ask)
        Engine.step = step

    def count(self, num_tokens: int) -> None:
        was_asked = self.num_left > 0
        self.num_left = max(0, self.num_left - num_tokens)
        if was_asked and not self.num_left:
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    HaltingEngine().install()
    sys.exit(main())
