"""Memory that outlives engines: they pack their weights into it where there is no cache on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def weight_memory() -> Iterator[str]:
    """A path that children of this process can open, of a file without a name that takes no memory while it is empty.

    "" where the system has none. It is held by this process: who starts an engine again finds the weights.
    """
    if not hasattr(os, "memfd_create"):
        yield ""
        return
    descriptor = os.memfd_create("tokenmill-weights")
    try:
        os.fchmod(descriptor, 0o600)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
