"""Store the bodies of files in a folder that only the server's user may read. Names are ids made by the server.

FOLDER/batches.sqlite3    the database, see `store.py`
FOLDER/files/<id>         whole bodies
FOLDER/incoming/<id>      bodies still being received; the next start removes those that a crash has left
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
    """A body that is being written; it exists only once `keep` has returned."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.id = file_id
        self.num_bytes = 0
        self._path = folder / "incoming" / file_id
        self._target = folder / "files" / file_id
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)

    def write(self, data: bytes) -> None:
        """Append data to the body."""
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self, filename: str, purpose: str, now: float) -> File:
        """Keep the complete body; return its file once it is on the disk.

        Raises:
            OSError: the disk is full or broken; the body is not kept.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._target)
        with removed_on_failure(self._target):
            _sync(self._target.parent)
        return File(id=self.id, bytes=self.num_bytes, created_at=int(now), filename=filename, purpose=purpose)

    def drop(self) -> None:
        """Drop the body; do nothing after `keep`."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing writes what has waited for more, and the disk may be full
            self._file.close()


class FileFolder:
    """The folder of bodies, which one server has for itself."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvalidConfig: the folder cannot be used, or another server uses it.
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
        """Release the folder for another server."""
        os.close(self._lock)

    def body(self, file_id: str) -> Path:
        """Return the path of a file's body."""
        return self.path / "files" / file_id

    def new(self, file_id: str) -> IncomingFile:
        """Begin a new body."""
        return IncomingFile(self.path, file_id)

    def read(self, file_id: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a body, from `offset`."""
        with open(self.body(file_id), "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size)

    def remove(self, file_ids: Iterable[str]) -> None:
        """Remove bodies; ignore missing ones."""
        for file_id in file_ids:
            self.body(file_id).unlink(missing_ok=True)

    def remove_all_but(self, file_ids: set[str]) -> None:
        """Remove all other bodies, which a crash left without an entry in the database."""
        self.remove({path.name for path in (self.path / "files").iterdir()} - file_ids)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
