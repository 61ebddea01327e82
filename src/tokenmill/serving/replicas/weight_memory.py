"""Memory that outlives engines, in which they pack their weights where there is no cache on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def weight_memory() -> Iterator[str]:
    """Yield the path of an unnamed memory file that child processes can open; it takes no memory while empty.

    Yield "" on systems without such files. This process holds the file, so a restarted engine finds the weights.
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
