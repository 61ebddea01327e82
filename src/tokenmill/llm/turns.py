"""Define `Turns`, the lock by which threads share one engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Self


class Turns:
    """A reentrant lock that threads get in the order in which they ask for it.

    Otherwise a thread that runs one step after the other would keep out one that only wants to start a request.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._put_off: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Self:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        called = threading.Lock()
        called.acquire()
        with self._guard:
            if self._owner is None:
                self._owner = me
                called.release()
            else:
                self._waiting.append((me, called))
        try:
            called.acquire()
        except BaseException:  # Ctrl-C while it waits, or just as its turn comes
            self._leave_queue(me, called)
            raise
        self._depth = 1
        try:
            self._do_put_off()
        except BaseException:
            self._depth = 0
            self._hand_on()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self._do_put_off()
        finally:
            self._depth = 0
            self._hand_on()

    def do_between(self, work: Callable[[], None]) -> None:
        """Run `work` now if no thread has a turn, or at the end of that turn, or at the beginning of the next one.

        Never inside a turn: a garbage-collected generator calls this from wherever its thread happens to be.
        """
        self._put_off.append(work)
        if not self._guard.acquire(blocking=False):
            return
        is_free = self._owner is None
        if is_free:
            self._owner, self._depth = threading.get_ident(), 1
        self._guard.release()
        if is_free:
            self.__exit__()

    def _do_put_off(self) -> None:
        while self._put_off:
            self._put_off.popleft()()

    def _hand_on(self) -> None:
        with self._guard:
            self._owner, called = self._waiting.popleft() if self._waiting else (None, None)
        if called is not None:
            called.release()

    def _leave_queue(self, me: int, called: threading.Lock) -> None:
        with self._guard:
            is_owner = self._owner == me
            if not is_owner:
                self._waiting.remove((me, called))
        if is_owner:
            self._hand_on()
