"""Raise the limit of file descriptors, and count those that are left for connections."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

# For what else opens some while connections take theirs: children that start, pipes, a trace collector.
SPARE = 32
# However few there are, an operator should be able to look at the server.
_LEAST_CONNECTIONS = 8


def raise_limit() -> None:
    """Allow this process and its children as many descriptors as the system permits.

    The soft limit is low for programs that keep descriptors in sets of bits; nothing here does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS calls its limit infinite, and takes no such value
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_connections() -> int:
    """Return the number of connections that can be open at once beside the files open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
    return max(limit - len(os.listdir("/dev/fd")) - SPARE, _LEAST_CONNECTIONS)
