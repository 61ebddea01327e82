"""`SlotFile`: pages on a disk, in slots of a fixed size, and the log of their contents.

    kv-NAME.pages   |page|..|page|..|page|..|    slots of page_bytes, rounded up to 4 KiB
    kv-NAME.index   |header|record|record|...    one record for each page that was written, appended after it

A record has a checksum of its own and that of its page. So nothing need be written in a safe order: a record or a page
that was torn by a kill or a loss of power has a wrong checksum, and counts as a miss. Files are this user's alone and
belong to one engine at a time.

Pages are read and written by calls, not through mapped memory: where a disk fails or is full, a call says so, and
touching mapped memory kills the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.whole_file import removed_on_failure
from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.page_keys import KEY_BYTES
from tokenmill.engine.transfer.slots import Slot

VERSION = 1
SLOT_ALIGNMENT = 4096


class _Header(msgspec.Struct, frozen=True):
    """The first line of an index; files with another header are begun anew."""

    version: int
    name: str
    page_bytes: int
    page_size: int
    checksum: str


class SlotFile:
    """A slot store in the two files of one engine."""

    def __init__(self, folder: Path, name: str, page_bytes: int, page_size: int, limit: int) -> None:
        """Open or make the files; `slots` reads their contents.

        Args:
            name: identifies the pages: those of another model, format or layout are not found.
            limit: bytes that the pages may take.

        Raises:
            OSError: the folder cannot be made, a file is not this user's alone, another process has the files, or
                `limit` holds no page.
        """
        kind, self.checksum = find_checksum()
        self.page_bytes = page_bytes
        self._header = _Header(VERSION, name, page_bytes, page_size, kind)
        self._slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.num_slots = limit // self._slot_bytes
        if not self.num_slots:
            raise OSError(f"{limit} bytes hold no page of {page_bytes}")
        self._record = np.dtype(
            [("slot", "<u4"), ("page", "<u4"), ("key", "u1", KEY_BYTES), ("tokens", "<i4", page_size), ("own", "<u4")]
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._index_path = folder / f"kv-{name}.index"
        self._pages = _open(folder / f"kv-{name}.pages")
        self._index = -1
        try:
            fcntl.flock(self._pages, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._pages, self.num_slots * self._slot_bytes)
            self._index = _open(self._index_path)
        except OSError:
            self.close()
            raise

    def slots(self) -> Iterator[Slot]:
        """Yield the slots that the index names, least recently written first; a slot's latest record counts."""
        data = _read_all(self._index)
        line, _, body = data.partition(b"\n")
        if line != msgspec.json.encode(self._header):
            return
        size = self._record.itemsize
        records = np.frombuffer(body[: len(body) // size * size], dtype=self._record)
        latest: dict[int, Any] = {}
        for position, record in enumerate(records):
            own = memoryview(body)[position * size : (position + 1) * size - 4]
            if int(record["own"]) == self.checksum(own) and int(record["slot"]) < self.num_slots:
                latest.pop(int(record["slot"]), None)
                latest[int(record["slot"])] = record
        for number, record in latest.items():
            yield Slot(number, record["key"].tobytes(), record["tokens"].tobytes(), int(record["page"]))

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Begin the index anew with these records, in this order. The new index appears as a whole or not at all."""
        path = self._index_path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        index = _open(path)
        try:
            with removed_on_failure(path):
                _write_all(index, msgspec.json.encode(self._header) + b"\n" + b"".join(map(self._encode, slots)))
                path.rename(self._index_path)
        except OSError:
            os.close(index)
            raise
        os.close(self._index)
        self._index = index

    def append(self, slots: list[Slot]) -> None:
        """Record the new contents of some slots.

        Raises:
            OSError: the disk is full or broken.
        """
        size = os.fstat(self._index).st_size
        try:
            _write_all(self._index, b"".join(map(self._encode, slots)))
        except OSError:
            os.ftruncate(self._index, size)
            raise

    def _encode(self, slot: Slot) -> bytes:
        record = np.zeros((), dtype=self._record)
        record["slot"], record["page"] = slot.number, slot.checksum
        record["key"] = np.frombuffer(slot.key, dtype=np.uint8)
        record["tokens"] = np.frombuffer(slot.tokens, dtype="<i4")
        record["own"] = self.checksum(memoryview(record.tobytes())[:-4])
        return record.tobytes()

    def write(self, number: int, data: memoryview) -> None:
        """Write a page to a slot.

        Raises:
            OSError: the disk is full or broken.
        """
        position, start = number * self._slot_bytes, 0
        while start < len(data):
            start += os.pwrite(self._pages, data[start:], position + start)

    def read(self, slot: Slot, data: memoryview) -> bool:
        """Read a page; return False if it is not what was written."""
        position, start = slot.number * self._slot_bytes, 0
        while start < len(data):
            count = os.preadv(self._pages, [data[start:]], position + start)
            if not count:
                return False
            start += count
        return self.checksum(data) == slot.checksum

    def close(self) -> None:
        """Close the files."""
        for number in (self._pages, self._index):
            if number >= 0:
                os.close(number)
        self._pages = self._index = -1


def _open(path: Path) -> int:
    """Open or make a file to read and to append. Raise OSError if it is not this user's alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path, flags | (os.O_APPEND if path.suffix != ".pages" else 0), 0o600)
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(number)
        raise PermissionError(f"{path} is not a file of this user alone")
    return number


def _read_all(number: int) -> bytes:
    size = os.fstat(number).st_size
    parts, position = [], 0
    while position < size and (part := os.pread(number, size - position, position)):
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def _write_all(number: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(number, rest) :]
