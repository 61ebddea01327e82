"""SIGINT and SIGTERM, never at a moment at which they could leave something half made or half removed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, both wait until `handled_by` lets them through. Those that still wait at the end are dropped."""
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
    """Inside, each of them calls `callback` on the running loop. Only within `held_back`."""
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
