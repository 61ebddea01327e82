"""Write files that exist as a whole or not at all, even if a full disk or a kill interrupts the write."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file beside `path`, which replaces `path` when the block ends.

    If anything fails, up to the last byte, the new file is removed and the old one at `path` stays. Anything but a
    regular file (a pipe, a terminal) is written to directly.

    Args:
        mode: of the new file, reduced by the umask.

    Raises:
        OSError: it cannot be written; its `filename` is `path`.
    """
    is_new = path.is_file() or not path.exists()
    target = Path(os.path.realpath(path)) if is_new else path  # a link stays one
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}") if is_new else path
    try:
        with removed_on_failure(beside) if is_new else contextlib.nullcontext():
            kind = os.O_CREAT | os.O_EXCL if is_new else 0
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CLOEXEC | kind, mode), "wb") as file:
                yield file
            if is_new:
                os.replace(beside, target)
    except OSError as error:
        error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write all of a file; see `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file if the block fails in any way."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
