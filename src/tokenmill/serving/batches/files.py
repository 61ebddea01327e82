"""The bodies of files, in a folder that only the server's user may read. Names are ids that were made here.

FOLDER/batches.sqlite3    what there is, see `store.py`
FOLDER/files/<id>         whole bodies
FOLDER/incoming/<id>      those that are still coming; what a crash has left here is removed at the next start
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.whole_file import removed_on_failure
from tokenmill.serving.batches.batch import File


class IncomingFile:
    """A body that is being written; it is there once `keep` has returned, or not at all."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.id = file_id
        self.num_bytes = 0
        self._path = folder / "incoming" / file_id
        self._target = folder / "files" / file_id
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)

    def write(self, data: bytes) -> None:
        """Append to it."""
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self, filename: str, purpose: str, now: float) -> File:
        """It is complete, and on the disk.

        Raises:
            OSError: the disk is full or broken; it is not there.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._target)
        with removed_on_failure(self._target):
            _sync(self._target.parent)
        return File(id=self.id, bytes=self.num_bytes, created_at=int(now), filename=filename, purpose=purpose)

    def drop(self) -> None:
        """It is not wanted; nothing happens after `keep`."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing writes what has waited for more, and the disk may be full
            self._file.close()


class FileFolder:
    """The folder of a server, which has it for itself."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvalidConfig: it cannot be used, or another server does.
        """
        self.path = path
        try:
            for folder in (path, path / "files", path / "incoming"):
                folder.mkdir(mode=0o700, parents=folder is path, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in (path / "incoming").iterdir():
                left.unlink()
        except BlockingIOError as error:
            raise InvalidConfig(f"--batch-dir: another server uses {path}") from error
        except OSError as error:
            raise InvalidConfig(f"--batch-dir: {path} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        """Let another server have it."""
        os.close(self._lock)

    def body(self, file_id: str) -> Path:
        """Where the body of a file is."""
        return self.path / "files" / file_id

    def new(self, file_id: str) -> IncomingFile:
        """A file that begins."""
        return IncomingFile(self.path, file_id)

    def read(self, file_id: str, offset: int, size: int) -> bytes:
        """Part of a body."""
        with open(self.body(file_id), "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size)

    def remove(self, file_ids: Iterable[str]) -> None:
        """Remove bodies; those that are not there are not missed."""
        for file_id in file_ids:
            self.body(file_id).unlink(missing_ok=True)

    def remove_all_but(self, file_ids: set[str]) -> None:
        """Remove the bodies that nobody knows of: a crash came between a body and its entry."""
        self.remove({path.name for path in (self.path / "files").iterdir()} - file_ids)


def _sync(folder: Path) -> None:
    """Let the names in a folder be on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
