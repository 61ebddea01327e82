"""The real engine process, whose next step hangs when a prompt begins with one of two tokens.

    python -m tests.serving.server.hanging_engine FOLDER INDEX RANK LIFE

It hangs until somebody opens `gate`, a named pipe in the model's folder, for writing.
"""

import ctypes
import os
import sys
from pathlib import Path

from tokenmill.engine.loop.engine import Engine
from tokenmill.ipc.launch_file import LaunchFile
from tokenmill.startup.assembly.engine_process import main

WAITS, HOLDS_THE_LOCK = 7, 9


def wait_for_gate(gate: Path) -> None:
    os.close(os.open(gate, os.O_RDONLY))


def hold_the_lock(gate: Path) -> None:
    """No other thread of the interpreter runs meanwhile."""
    libc = ctypes.PyDLL(None)
    libc.close(libc.open(bytes(gate), os.O_RDONLY))


class HangingEngine:
    def __init__(self, gate: Path) -> None:
        self.gate = gate
        self.hang = None
        self.add, self.step = Engine.add, Engine.step

    def install(self) -> None:
        def add(engine, message):
            self.hang = {WAITS: wait_for_gate, HOLDS_THE_LOCK: hold_the_lock}.get(message.prompt_token_ids[0])
            return self.add(engine, message)

        def step(engine):
            hang, self.hang = self.hang, None
            if hang is not None:
                hang(self.gate)
            return self.step(engine)

        Engine.add, Engine.step = add, step


if __name__ == "__main__":
    HangingEngine(Path(LaunchFile.read(Path(sys.argv[1])).engine.model) / "gate").install()
    sys.exit(main())
