"""A folder of packed weights that outlives processes: its files, and which of them go when it is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

from tokenmill.model.weights.packed_file import HEADER_BYTES, Content, PackedFile, is_ours

logger = logging.getLogger(__name__)

SUFFIX = ".weights"
# Unless the user says how much: a fifth of what the disk has left, and this at most.
SHARE, MOST_BYTES = 5, 64 << 30


def place_in(folder: Path, content: Content, limit: int | None) -> Path:
    """Return the path of a content, with room for it: least recently used files are removed unless they are in use.

    Args:
        limit: bytes that the folder may hold; None: see `MOST_BYTES`.

    Raises:
        OSError: the folder cannot be made or is not this user's alone, or there is no room.
    """
    folder = own_folder(folder)
    path = folder / f"{content.key}{SUFFIX}"
    files = _files(folder)
    found, needed = files.pop(path, None), HEADER_BYTES + content.num_bytes
    if found is not None and not is_ours(found):
        logger.warning("%s is no file of this user alone; it is removed", path)
        path.unlink()
    elif found is not None and found.st_size == needed:
        return path
    _make_room(folder, files, needed, limit)
    return path


def own_folder(folder: Path) -> Path:
    """Return a folder by its real name, made if it is missing.

    Raises:
        OSError: it cannot be made or is not this user's alone.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "others may write in this folder", str(folder))
    return folder


def _files(folder: Path) -> dict[Path, os.stat_result]:
    found = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another start has removed it
            found[path] = path.lstat()
    return found


def _make_room(folder: Path, files: dict[Path, os.stat_result], needed: int, limit: int | None) -> None:
    own = {path: status for path, status in files.items() if is_ours(status)}
    held = sum(status.st_size for status in own.values())
    if limit is None:
        limit = min(MOST_BYTES, (shutil.disk_usage(folder).free + held) // SHARE)
    if needed <= limit:
        for path in sorted(own, key=lambda path: own[path].st_mtime_ns):
            if held + needed > limit and _remove(path):
                held -= own[path].st_size
    if held + needed > limit:
        raise OSError(errno.ENOSPC, f"it may hold {limit >> 20:,} MiB, and {needed >> 20:,} are needed", str(folder))


def _remove(path: Path) -> bool:
    """Remove a file unless it is in use."""
    file = PackedFile(path, Content("", 0))
    try:
        if not file.lock(fcntl.LOCK_EX):
            return False
        path.unlink(missing_ok=True)
        logger.info("%s is removed from the cache of packed weights", path)
        return True
    finally:
        file.close()
