"""`SlotFormat`: the bytes of a store's two files, which its engine writes and the others of this machine read.

    kv-NAME-N.pages   |page|..|page|..|page|..|    slots of page_bytes, rounded up to 4 KiB
    kv-NAME-N.index   |header|record|record|...    one record for each page that was written, appended after it

A record has a checksum of its own and that of its page. So nothing need be written in a safe order: a record or a page
that was torn by a kill or a loss of power, or read while it was written, has a wrong checksum, and counts as a miss.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.page_keys import KEY_BYTES
from tokenmill.engine.transfer.slots import NeighbourSlot, Slot

VERSION = 2
SLOT_ALIGNMENT = 4096
# Pieces of memory that one call of the system fills.
MOST_PARTS = 1024


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

    def read_pages(self, pages: int, slots: Sequence[Slot], data: memoryview) -> int:
        """Read the pages of slots that follow each other; return how many are there, unchecked, from the first on.

        Args:
            pages: descriptor of the file with the slots.
            data: [len(slots) * page_bytes], filled with one page behind another.

        Raises:
            OSError: the disk is broken.
        """
        gap, size = bytearray(self.slot_bytes - self.page_bytes), self.page_bytes
        parts = [data[start : start + size] for start in range(0, len(slots) * size, size)]
        if gap:
            parts = [part for page in parts for part in (page, memoryview(gap))][:-1]
        return (_read_into(parts, pages, slots[0].number * self.slot_bytes) + len(gap)) // self.slot_bytes


def read_elsewhere(form: SlotFormat, slots: Sequence[NeighbourSlot], data: memoryview) -> int:
    """Do `SlotFormat.read_pages` in the file that the slots are in; 0 if it is gone, or cannot be read."""
    try:
        pages = open_own(slots[0].pages, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return form.read_pages(pages, slots, data)
    except OSError:
        return 0
    finally:
        os.close(pages)


def _read_into(parts: list[memoryview], number: int, position: int) -> int:
    """Fill pieces of memory, one after another, from a file; return how many bytes it had for them."""
    total = 0
    while parts and (count := os.preadv(number, parts[:MOST_PARTS], position + total)):
        total += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]
    return total


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
