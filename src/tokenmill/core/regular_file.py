"""Open files that come from outside: only regular ones, since opening a named pipe would wait for its writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: the file does not exist, may not be read, or is a pipe, a device or a folder.
    """
    # Without waiting: a pipe without a writer is opened, too, and then refused.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Read all of a file; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()
