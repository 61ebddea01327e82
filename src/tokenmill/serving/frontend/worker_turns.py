"""Choose the text worker of each call: in turn, without avoided ones."""

from __future__ import annotations

from zlib import crc32

from tokenmill.core.errors import EngineDead


class WorkerTurns:
    """Chooses text workers in turn."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._last = -1
        self._avoided: set[int] = set()

    def avoid(self, worker: int, is_avoided: bool) -> None:
        """Give a worker no calls from now on, or let it take part again."""
        if is_avoided:
            self._avoided.add(worker)
        else:
            self._avoided.discard(worker)

    def next(self, session: str = "") -> int:
        """Return the next worker in turn, or the worker of a session.

        Raises:
            EngineDead: all workers are avoided.
        """
        last = crc32(session.encode()) if session else self._last
        for step in range(1, self._num_workers + 1):
            worker = (last + step) % self._num_workers
            if worker not in self._avoided:
                self._last = self._last if session else worker
                return worker
        raise EngineDead("no text worker answers; /health says which is in trouble")
