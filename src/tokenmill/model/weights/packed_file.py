"""A file of packed weights that every engine of the machine maps: written once, checked at each start.

    |header: JSON, then zeros, 2 MiB in all|weights and vectors, in the order in which a decoder makes them|

The file has a name in a cache folder, or lies in memory (memfd). A process that maps it holds a shared lock on it, one
that writes it the exclusive lock, and the header is written last. So there are no temporary files: what a dead writer
leaves behind has no header, and is written anew. No process waits for a disk either: the checksum finds what a crash of
the machine tears.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.platform.memory import HUGE_PAGE, map_shared

logger = logging.getLogger(__name__)

HEADER_BYTES = HUGE_PAGE
# What a header may take of that.
MOST_JSON = 4096
# Words of 8 bytes in a row, and rows in a piece of 1 MiB: a second look at it finds it in a core's cache.
ROW, ROWS = 512, 256
# How long the file may be another's to write, and how often to look, in seconds.
PATIENCE, PAUSE = 600.0, 0.05
# Looks at a file that is damaged while others use it, before it is left alone.
DAMAGED_LOOKS = 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Content(msgspec.Struct, frozen=True):
    """The content that a file has to hold.

    Attributes:
        key: hexadecimal digits; other weights, in another form, have another key.
        num_bytes: of the weights, whole pages.
    """

    key: str
    num_bytes: int


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description that a file has of itself. Every field is compared; none is trusted."""

    key: str
    num_bytes: int
    checksum: str


class PackedFile:
    """An open file, with at most one lock on it. What is mapped keeps the lock.

    Args:
        threads: how many may compute its checksum.

    Raises:
        OSError: it cannot be opened, or is not ours alone.
    """

    def __init__(self, path: Path, content: Content, threads: int = 1) -> None:
        self.path = path
        self.content = content
        self._threads = threads
        named = 0 if is_memory(path) else os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | named, 0o600)
        if not is_ours(os.fstat(self._descriptor)):
            self.close()
            raise OSError(errno.EPERM, "it is not a file of this user alone", str(path))

    def close(self) -> None:
        """Close the file, and let go of the lock unless the file is mapped."""
        os.close(self._descriptor)

    def lock(self, kind: int) -> bool:
        """Replace the lock held by `fcntl.LOCK_SH` or `fcntl.LOCK_EX`; return False, holding none, if others hold
        locks."""
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @property
    def num_bytes(self) -> int:
        """Current length in bytes."""
        return os.fstat(self._descriptor).st_size

    def is_current(self) -> bool:
        """Return True if its name still leads to it."""
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._descriptor))

    def is_whole(self) -> bool:
        """Return True if it holds the content; every byte is looked at."""
        header, wanted = self._header(), self.content
        if header is None or (header.key, header.num_bytes) != (wanted.key, wanted.num_bytes):
            return False
        is_long_enough = self.num_bytes == HEADER_BYTES + wanted.num_bytes
        return is_long_enough and header.checksum == checksum(self.map(), self._threads)

    def map(self) -> npt.NDArray[np.uint8]:
        """Map the weights, uint8, not to be written."""
        return map_shared(self._descriptor, HEADER_BYTES + self.content.num_bytes, False)[HEADER_BYTES:]

    def write(self, fill: Callable[[npt.NDArray[np.uint8]], object]) -> None:
        """Write the content. The caller holds the exclusive lock.

        Args:
            fill: writes the weights into zeroed memory.

        Raises:
            OSError: there is no room.
        """
        if self.num_bytes:
            logger.warning("%s is incomplete or damaged; the weights are packed anew", self.path)
        try:
            os.ftruncate(self._descriptor, 0)
            # A hole that the disk has no block for would end the process when it is written.
            os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + self.content.num_bytes)
            memory = map_shared(self._descriptor, HEADER_BYTES + self.content.num_bytes, True)[HEADER_BYTES:]
            fill(memory)
            header = Header(self.content.key, self.content.num_bytes, checksum(memory, self._threads))
            os.pwrite(self._descriptor, msgspec.json.encode(header), 0)
        except BaseException:
            os.ftruncate(self._descriptor, 0)
            raise

    def touch(self) -> None:
        """Mark it as just used."""
        os.utime(self._descriptor)

    def _header(self) -> Header | None:
        try:
            return msgspec.json.decode(os.pread(self._descriptor, MOST_JSON, 0).rstrip(b"\0"), type=Header)
        except (ValueError, RecursionError):
            return None


class Claim(Enum):
    """The outcome of a look at a file."""

    WHOLE = "it holds the content, and we a shared lock"
    OURS = "it does not, and we may write it: we hold the exclusive lock"
    BUSY = "another writes it, or has taken its name away"
    DAMAGED = "it does not hold the content, and others hold locks"


def claim(path: Path, content: Content, waits: Callable[[], object], threads: int = 1) -> tuple[PackedFile, Claim]:
    """Open a file and take a lock, waiting for a process that writes it.

    Args:
        waits: called again and again meanwhile.
        threads: see `PackedFile`.

    Returns:
        The file, and `WHOLE` or `OURS`.

    Raises:
        OSError: another process keeps it busy for too long, or it is damaged and in use.
    """
    deadline, num_damaged = time.monotonic() + PATIENCE, 0
    while time.monotonic() < deadline and num_damaged < DAMAGED_LOOKS:
        file = PackedFile(path, content, threads)
        found = _look(file)
        if found in (Claim.WHOLE, Claim.OURS):
            return file, found
        file.close()
        num_damaged += found is Claim.DAMAGED
        waits()
        time.sleep(PAUSE)
    raise OSError(errno.EBUSY, "another writes it for ever, or it is damaged and in use", str(path))


def is_ours(status: os.stat_result) -> bool:
    """Return True for a regular file of this user that no other user may open."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def is_memory(path: Path) -> bool:
    """Return True for a descriptor of another process (/proc/PID/fd/N) rather than a name in a folder."""
    return path.is_relative_to("/proc")


def checksum(memory: npt.NDArray[np.uint8], threads: int = 1) -> str:
    """Return 32 hexadecimal digits for whole pages of uint8, as fast as memory is read.

    The sums of each row and each column of a piece are hashed: a row is 4 KiB, a piece 1 MiB. Damage to a word or a row
    changes one of them for certain, and so does an exchange of any two. It is no defence against a user who may write
    the file: the system's permissions are.
    """
    rows = memory.view(np.int64).reshape(-1, ROW)

    def digest(start: int) -> bytes:
        piece = rows[start : start + ROWS]
        sums = np.concatenate((np.add.reduce(piece, 0), np.add.reduce(piece, 1)))
        return blake2b(sums.tobytes(), digest_size=16).digest()

    with ThreadPoolExecutor(threads) as pool:
        digests = b"".join(pool.map(digest, range(0, len(rows), ROWS)))
    return blake2b(digests, digest_size=16).hexdigest()


def _look(file: PackedFile) -> Claim:
    if not file.lock(fcntl.LOCK_SH) or not file.is_current():
        return Claim.BUSY
    if file.is_whole():
        return Claim.WHOLE
    if not file.lock(fcntl.LOCK_EX):
        return Claim.DAMAGED
    # The first lock was let go before the other was taken: somebody may have come between.
    if not file.is_current() or file.is_whole():
        return Claim.BUSY
    return Claim.OURS
