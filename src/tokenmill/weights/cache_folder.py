"""A folder of packed weights that outlives processes: what is in it, and what goes when it is full."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

from tokenmill.weights.packed_file import HEADER_BYTES, Content, PackedFile, is_ours

logger = logging.getLogger(__name__)

SUFFIX = ".weights"
# Unless the user says how much: a fifth of what the disk has left, and this at most.
SHARE, MOST_BYTES = 5, 64 << 30


def place_in(folder: Path, content: Content, limit: int | None) -> Path:
    """Where a content belongs, with room for it: those used least recently are removed, none that is in use.

    Args:
        limit: bytes that the folder may hold; None: see `MOST_BYTES`.

    Raises:
        OSError: the folder cannot be made or is not this user's alone, or there is no room.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "others may write in this folder", str(folder))
    path = folder / f"{content.key}{SUFFIX}"
    if os.path.lexists(path) and not is_ours(path.lstat()):
        logger.warning("%s is no file of this user alone; it is removed", path)
        path.unlink()
    needed = HEADER_BYTES + content.num_bytes
    if not path.exists() or path.stat().st_size != needed:
        _make_room(folder, path, needed, limit)
    return path


def _make_room(folder: Path, path: Path, needed: int, limit: int | None) -> None:
    others = [other for other in folder.glob(f"*{SUFFIX}") if other != path and is_ours(other.lstat())]
    sizes = {other: other.stat().st_size for other in others}
    held = sum(sizes.values())
    if limit is None:
        limit = min(MOST_BYTES, (shutil.disk_usage(folder).free + held) // SHARE)
    if needed <= limit:
        for other in sorted(others, key=lambda other: other.stat().st_mtime_ns):
            if held + needed > limit and _remove(other):
                held -= sizes[other]
    if held + needed > limit:
        raise OSError(errno.ENOSPC, f"it may hold {limit >> 20:,} MiB, and {needed >> 20:,} are needed", str(folder))


def _remove(path: Path) -> bool:
    """Remove a file unless it is in use."""
    file = PackedFile(path, Content("", 0))
    try:
        if not file.lock(fcntl.LOCK_EX):
            return False
        path.unlink()
        logger.info("%s is removed from the cache of packed weights", path)
        return True
    finally:
        file.close()
