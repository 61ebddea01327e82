"""For clients that are commands: runs one beside the interpreter of its environment."""

import os
import subprocess
import sys
from pathlib import Path

from report import SECONDS


def output(*command: str, **variables: str) -> str:
    """Return what it printed.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    program = str(Path(sys.executable).parent / command[0])
    done = subprocess.run(
        [program, *command[1:]],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout.strip()[-250:]}")
    return done.stdout
