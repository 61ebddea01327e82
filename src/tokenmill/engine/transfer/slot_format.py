"""`SlotFormat`: the bytes of a store's two files, which its engine writes and the others of this machine read.

    kv-NAME-N.pages   |page|..|page|..|page|..|    slots of page_bytes, rounded up to 4 KiB
    kv-NAME-N.index   |header|record|record|...    one record for each page that was written, appended after it

A record has a checksum of its own and that of its page. So nothing need be written in a safe order: a record or a page
that was torn by a kill or a loss of power, or read while it was written, has a wrong checksum, and counts as a miss.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.page_keys import KEY_BYTES
from tokenmill.engine.transfer.slots import Slot

VERSION = 2
SLOT_ALIGNMENT = 4096


class _Header(msgspec.Struct, frozen=True):
    """The first line of an index; files with another header hold something else."""

    version: int
    name: str
    page_bytes: int
    page_size: int
    checksum: str


class SlotFormat:
    """The layout of pages of one kind in files.

    Attributes:
        name: identifies the pages: those of another model, format or layout are not found.
        page_bytes: bytes of a page. slot_bytes: from one slot to the next.
        record_bytes: of a record. header: the first line of an index.
    """

    def __init__(self, name: str, page_bytes: int, page_size: int) -> None:
        kind, self.checksum = find_checksum()
        self.name, self.page_bytes = name, page_bytes
        self.slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.header = msgspec.json.encode(_Header(VERSION, name, page_bytes, page_size, kind)) + b"\n"
        self._record = np.dtype(
            [("slot", "<u4"), ("page", "<u4"), ("key", "u1", KEY_BYTES), ("tokens", "<i4", page_size), ("own", "<u4")]
        )
        self.record_bytes = self._record.itemsize

    def encode(self, slot: Slot) -> bytes:
        """Return the record of a slot."""
        record = np.zeros((), dtype=self._record)
        record["slot"], record["page"] = slot.number, slot.checksum
        record["key"] = np.frombuffer(slot.key, dtype=np.uint8)
        record["tokens"] = np.frombuffer(slot.tokens, dtype="<i4")
        record["own"] = self.checksum(memoryview(record.tobytes())[:-4])
        return record.tobytes()

    def decode(self, data: bytes) -> Iterator[Slot]:
        """Yield the slots of whole records, in their order; damaged ones are passed over."""
        size = self.record_bytes
        records = np.frombuffer(data[: len(data) // size * size], dtype=self._record)
        for position, record in enumerate(records):
            own = memoryview(data)[position * size : (position + 1) * size - 4]
            if int(record["own"]) == self.checksum(own):
                key, tokens = record["key"].tobytes(), record["tokens"].tobytes()
                yield Slot(int(record["slot"]), key, tokens, int(record["page"]))

    def read_page(self, pages: int, slot: Slot, data: memoryview) -> bool:
        """Read a page; return False if it is not what its record says.

        Args:
            pages: descriptor of the file with the slots.

        Raises:
            OSError: the disk is broken.
        """
        position, start = slot.number * self.slot_bytes, 0
        while start < len(data):
            count = os.preadv(pages, [data[start:]], position + start)
            if not count:
                return False
            start += count
        return self.checksum(data) == slot.checksum


def open_own(path: Path, flags: int) -> int:
    """Open a file. Raise OSError if it is not this user's alone."""
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(number)
        raise PermissionError(f"{path} is not a file of this user alone")
    return number


def read_from(number: int, position: int) -> bytes:
    """Read a file from a position to its end."""
    size, parts = os.fstat(number).st_size, []
    while position < size and (part := os.pread(number, size - position, position)):
        parts.append(part)
        position += len(part)
    return b"".join(parts)
