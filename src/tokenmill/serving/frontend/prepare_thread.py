"""Prepare long messages in a thread, so that short ones need not wait for them.

A text worker turns the tokens of all streams into text. While it encoded a text of 15 MiB itself, every stream stood
still for half a minute.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tokenmill.serving.frontend.prompt_processor import Prepared, Question, ids_of


class PrepareThread:
    """A thread that prepares messages in order of arrival. Call its methods only in the thread that made it.

    Attributes:
        fd: becomes readable when a message is finished.
    """

    def __init__(self, prepare: Callable[[Question], Prepared]) -> None:
        """`prepare` runs in the new thread."""
        self._prepare = prepare
        self._todo: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._done: deque[tuple[Question, Prepared | None]] = deque()
        self._inside: set[str] = set()
        self._aborted: set[str] = set()
        self.fd, self._bell = os.pipe()
        os.set_blocking(self.fd, False)
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
        self._thread.start()

    def put(self, message: Question) -> None:
        """Queue a message to be prepared."""
        self._inside.update(ids_of(message))
        self._todo.put(message)

    def abort(self, ids: Sequence[str]) -> None:
        """Mark these ids as aborted; ignore ids that are not inside."""
        self._aborted.update(self._inside.intersection(ids))

    def holds(self, request_id: str) -> bool:
        """Return True if a message with this id is inside, or is finished but not fetched yet."""
        return request_id in self._inside

    def acknowledge(self) -> None:
        """Reset `fd`, so that it waits for the next finished message."""
        with contextlib.suppress(OSError):  # it has not rung
            os.read(self.fd, 1 << 16)

    def finished(self) -> list[tuple[Question, Prepared, list[str]]]:
        """Return messages finished since the last call, each with its result and those of its ids that were aborted."""
        found = []
        while self._done:
            message, prepared = self._done.popleft()
            ids = ids_of(message)
            aborted = [one for one in ids if one in self._aborted]
            if prepared is not None and len(aborted) < len(ids):
                found.append((message, prepared, aborted))
            self._inside.difference_update(ids)
            self._aborted.difference_update(ids)
        return found

    def close(self) -> None:
        """Begin no more messages. A running one is not waited for: it may take long, and its result is unwanted."""
        self._todo.put(None)
        os.close(self.fd)

    def _run(self) -> None:
        while (message := self._todo.get()) is not None:
            is_wanted = not self._aborted.issuperset(ids_of(message))
            self._done.append((message, self._prepare(message) if is_wanted else None))
            with contextlib.suppress(BrokenPipeError):  # closed
                os.write(self._bell, b"x")
        os.close(self._bell)
