"""Accept from one socket in several processes, so that they share its connections evenly.

The system wakes all of them and gives a connection to the fastest, which may be the same one each time. So each shows
the others how many connections it has, in a shared page of memory, and steps back while another has fewer. A process
that shows no sign of life is not waited for: it is dead, hangs, or has not begun.

    count, beat | count, beat | ...     of each process: connections, and the time at which it last wrote them
"""

from __future__ import annotations

import mmap
import socket
import struct
import time
from collections.abc import Callable

BEAT_SECONDS = 0.1
DEAF_SECONDS = 1.0
# Two that accept at the same time may both be right: only beyond this is one of them too fast.
MOST_AHEAD = 1

_ENTRY = struct.Struct("=qd")


class ConnectionCounts:
    """The number of connections of each process, in memory that is made before they are forked."""

    def __init__(self, num_processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Make the shared memory; all processes must have the same `clock`, as the system's monotonic one is."""
        self._page = mmap.mmap(-1, num_processes * _ENTRY.size)
        self._num_processes = num_processes
        self._clock = clock

    def note(self, index: int, count: int) -> None:
        """Show the number of connections of a process, and that it is awake."""
        _ENTRY.pack_into(self._page, index * _ENTRY.size, count, self._clock())

    def is_ahead(self, index: int) -> bool:
        """Return True if another process that is awake should take the next connection."""
        now = self._clock()
        entries = [_ENTRY.unpack_from(self._page, one * _ENTRY.size) for one in range(self._num_processes)]
        awake = [count for count, beat in entries if now - beat < DEAF_SECONDS and beat]
        return bool(awake) and entries[index][0] > min(awake) + MOST_AHEAD


class SharedListener(socket.socket):
    """A listening socket in one of the processes that accept from it."""

    def __init__(self, listener: socket.socket, counts: ConnectionCounts, index: int) -> None:
        """Take the place of `listener` in this process, which has `index` among all."""
        super().__init__(fileno=listener.detach())
        self._counts = counts
        self._index = index

    def note(self, count: int) -> None:
        """Show how many connections this process has."""
        self._counts.note(self._index, count)

    def is_ahead(self) -> bool:
        """Return True if another process should take the next connection."""
        return self._counts.is_ahead(self._index)
