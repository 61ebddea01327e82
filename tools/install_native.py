"""Installs TokenMill in place and compiles its kernels, and shows how far that is: `compiled 31 of 94, 62 s`.

With `--local` only for the instruction set that this machine uses, else for all, from which a machine chooses.
What the compiler prints is shown only if it fails. Standard library only.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO

COMMAND = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--verbose", "--no-deps")
COMMAND += ("--no-build-isolation", "--editable", ".")
# ninja's `[31/94] Building CXX object ...`
COUNT = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
NOT_BUILT = re.compile(r"native kernels: not built \((.*)\)")
ADVICE = "torch's serve, slower, where it is installed (make serve TORCH=cpu); a C++ compiler and `make clean` mend it"
LINES_OF_A_FAILURE = 60
SECONDS_BETWEEN_LINES = 30.0


def main() -> int:
    """Install; returns pip's exit code."""
    is_local = "ON" if "--local" in sys.argv[1:] else "OFF"
    command = [*COMMAND, f"--config-settings=cmake.define.LOCAL={is_local}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        said = list(watch(pip.stdout, Progress(sys.stderr)))
    if pip.returncode != 0:
        sys.stderr.writelines(["\n", *said[-LINES_OF_A_FAILURE:]])
    elif reasons := [match[1] for line in said if (match := NOT_BUILT.search(line))]:
        print(f"  no kernels were compiled ({reasons[0]}): {ADVICE}", flush=True)
    return pip.returncode


class Progress:
    """One line: rewritten in place on a terminal, elsewhere printed now and then."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started = self._shown = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """`done` of `total` files are compiled."""
        now = time.monotonic()
        text = f"  compiled {done} of {total}, {now - self._started:.0f} s"
        if self._is_terminal:
            end = "\n" if done == total else ""
            self._stream.write(f"\r\x1b[2K{text}{end}")
        elif done == total or now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            self._stream.write(text + "\n")
        self._stream.flush()


def watch(lines: Iterable[str], progress: Progress) -> Iterator[str]:
    """The lines; what they say of how far the compiler is goes to `progress`."""
    for line in lines:
        if match := COUNT.match(line):
            progress.show(int(match[1]), int(match[2]))
        yield line


if __name__ == "__main__":
    sys.exit(main())
