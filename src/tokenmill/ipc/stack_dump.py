"""The stacks of another process's threads: a thread of that process writes them to a file of the private folder when a
byte comes through the pipe beside it.

A thread walks the others' stacks safely while it holds the interpreter's lock, since no other thread runs then. Where
something keeps the lock, a signal asks: faulthandler's handler needs no interpreter, and the stacks stand still because
the lock is kept. The signal is never sent to a process that may be running: walking stacks that change has ended
processes with a segmentation fault.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import faulthandler
import fcntl
import os
import signal
import tempfile
import termios
import threading
from pathlib import Path
from typing import BinaryIO

_SIGNAL = signal.SIGUSR1
_MOST_BYTES = 64 << 10
_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.05


def stack_file(folder: Path, part: str) -> Path:
    """Return the file that a process of this name writes its stacks to."""
    return folder / f"{part}.stacks"


def offer_stacks(path: Path) -> None:
    """Write this process's stacks to `path` whenever another process asks."""
    os.mkfifo(_pipe(path), 0o600)
    # Open for writing, too: a pipe without a writer would be at its end.
    questions = os.open(_pipe(path), os.O_RDWR)
    partial = path.with_suffix(".partial")
    stacks = partial.open("ab")
    faulthandler.register(_SIGNAL, stacks, all_threads=True)
    threading.Thread(target=_answer, args=(questions, stacks), name="stacks", daemon=True).start()
    # Only now: the signal ends a process that does not expect it, so it must not be sent before the file is there.
    partial.rename(path)


async def ask_for_stacks(path: Path, pid: int) -> str:
    """Return the stacks of a process that offers them at `path`, or a sentence that says why there are none."""
    if not path.exists():
        return "it cannot show its stack yet"
    start = path.stat().st_size
    questions = os.open(_pipe(path), os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):  # full of questions that it has not read
            os.write(questions, b"?")
        stacks = await _wait_for_stacks(path, start)
        if not stacks and _is_stopped(pid):
            return f"it has been stopped by a signal and cannot show its stack; kill -CONT {pid} lets it go on"
        if not stacks and not _num_unread(questions):  # its thread runs and waits for the lock
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
            stacks = await _wait_for_stacks(path, start)
    finally:
        os.close(questions)
    return stacks or "it does not show its stack"


def own_stacks() -> str:
    """Return the stacks of this process's threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST_BYTES).decode(errors="replace").strip()


def _pipe(path: Path) -> Path:
    return path.with_suffix(".ask")


def _answer(questions: int, stacks: BinaryIO) -> None:
    while os.read(questions, 64):
        faulthandler.dump_traceback(stacks, all_threads=True)


async def _wait_for_stacks(path: Path, start: int) -> str:
    """Return the text behind `start` when it has stopped growing; empty if nothing comes in time."""
    end = start
    for _ in range(round(_PATIENCE_SECONDS / _LOOK_SECONDS)):
        await asyncio.sleep(_LOOK_SECONDS)
        size = path.stat().st_size
        if size > start and size == end:
            break
        end = size
    with path.open("rb") as file:
        file.seek(start)
        return file.read(_MOST_BYTES).decode(errors="replace").strip()


def _num_unread(pipe: int) -> int:
    """Return the number of unread bytes in a pipe."""
    found = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return found[0]


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "\nState:\tT" in status
