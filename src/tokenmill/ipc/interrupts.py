"""End or interrupt a process when that is safe: Ctrl-C between steps, never inside one, and the end of its parent.

An engine that is interrupted halfway through its books could not go on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class SignalBell:
    """A descriptor that can be read when a signal has come: a wait for messages that listens to it ends.

    Without it Python would run the signal's handler and wait on.
    """

    def __init__(self) -> None:
        """Listen from now on; only the main thread can."""
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._reader

    def silence(self) -> None:
        """Forget the signals that have come."""
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)


def accept_signals() -> None:
    """Let signals come from now on, in a process whose parent held them back when it started it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let SIGINT wait until the block is left, then handle it as it would have been.

    Only the main thread gets signals; elsewhere there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        signal.raise_signal(signal.SIGINT)


def end_with_parent() -> None:
    """End this process when its parent is gone: however the parent died, its end of our stdin closes."""

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a thread, aborts the interpreter when it ends.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
