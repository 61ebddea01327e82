"""File descriptors: how many this process may have, and what is left of them for connections."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

# For what else opens some while connections take theirs: children that start, pipes, a trace collector.
SPARE = 32
# However few there are, somebody should be able to look at the server.
_LEAST_CONNECTIONS = 8


def raise_limit() -> None:
    """Allow this process, and the children that it starts, as many as the system lets it have.

    The soft limit is low for programs that keep descriptors in sets of bits; nothing here does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS calls its limit infinite, and takes no such value
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_connections() -> int:
    """How many connections can be open at once beside what is open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    return max(limit - len(os.listdir("/dev/fd")) - SPARE, _LEAST_CONNECTIONS)
