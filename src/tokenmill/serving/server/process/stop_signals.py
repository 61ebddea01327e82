"""Handle SIGINT and SIGTERM only at moments when they cannot leave work half done."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold both signals back inside, until `handled_by` lets them through; drop those still waiting at the end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handled_by(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` on the running loop for each of the signals. Only within `held_back`."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, callback)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
