"""The real text worker process, whose tokenizer does harm with texts that hold certain words.

python -m tests.serving.server.hanging_text_worker FOLDER INDEX LIFE
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from tokenmill.serving.frontend.tokenizer import Tokenizer
from tokenmill.serving.frontend.worker import main

# No other thread of the interpreter runs meanwhile; others do; the system's own doing; a crash.
HOLDS_THE_LOCK, SLEEPS, KILLED, CRASHES = "hold the lock", "sleep for ever", "run out of memory", "crash at once"


def do_harm(text: str, gate: Path) -> None:
    if HOLDS_THE_LOCK in text:
        ctypes.PyDLL(None).open(bytes(gate), os.O_RDONLY)  # nobody ever writes
    if SLEEPS in text:
        while True:
            time.sleep(60)
    if KILLED in text:
        signal.raise_signal(signal.SIGKILL)
    if CRASHES in text:
        signal.raise_signal(signal.SIGSEGV)


def install(gate: Path) -> None:
    os.mkfifo(gate)
    encode = Tokenizer.encode

    def encode_or_not(tokenizer, text, add_special_tokens=True):
        do_harm(text, gate)
        return encode(tokenizer, text, add_special_tokens)

    Tokenizer.encode = encode_or_not


if __name__ == "__main__":
    folder, index, life = sys.argv[1:]
    install(Path(folder, f"gate-{index}-{life}"))
    sys.exit(main())
