"""Signals when they can be obeyed: Ctrl-C between steps, never inside one, since an engine interrupted halfway through
its books could not go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
