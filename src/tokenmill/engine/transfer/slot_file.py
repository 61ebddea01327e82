"""`SlotFile`: pages on a disk, in slots of a fixed size, and the log of their contents: see `SlotFormat`.

Files are this user's alone, and one engine at a time writes them. Pages are read and written by calls, not through
mapped memory: where a disk fails or is full, a call says so, and touching mapped memory kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenmill.core.whole_file import removed_on_failure
from tokenmill.engine.transfer.slot_format import SlotFormat, open_own, read_from
from tokenmill.engine.transfer.slots import Slot

# Engines that store pages of one kind in a folder.
MOST_ENGINES = 64


class SlotFile:
    """A slot store in two files, the first that no other engine has."""

    def __init__(self, folder: Path, form: SlotFormat, limit: int, engine: int = 0) -> None:
        """Open or make the files; `slots` reads their contents.

        Args:
            limit: bytes that the pages may take.
            engine: the number of the files that are tried first.

        Raises:
            OSError: the folder cannot be made, a file is not this user's alone, other engines have them all, or
                `limit` holds no page.
        """
        self.folder, self.form = folder, form
        self.page_bytes, self.checksum = form.page_bytes, form.checksum
        self.num_slots = limit // form.slot_bytes
        if not self.num_slots:
            raise OSError(f"{limit} bytes hold no page of {form.page_bytes}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, self._pages = _claim(folder, form.name, engine)
        self.index_path = path.with_suffix(".index")
        self._index = -1
        try:
            os.ftruncate(self._pages, self.num_slots * form.slot_bytes)
            self._index = _open(self.index_path)
        except OSError:
            self.close()
            raise

    def slots(self) -> Iterator[Slot]:
        """Yield the slots that the index names, least recently written first; a slot's latest record counts."""
        data = read_from(self._index, 0)
        if not data.startswith(self.form.header):
            return
        latest: dict[int, Slot] = {}
        for slot in self.form.decode(data[len(self.form.header) :]):
            if slot.number < self.num_slots:
                latest.pop(slot.number, None)
                latest[slot.number] = slot
        yield from latest.values()

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Begin the index anew with these records, in this order. The new index appears as a whole or not at all."""
        path = self.index_path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        index = _open(path)
        try:
            with removed_on_failure(path):
                _write_all(index, self.form.header + b"".join(map(self.form.encode, slots)))
                path.rename(self.index_path)
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
            _write_all(self._index, b"".join(map(self.form.encode, slots)))
        except OSError:
            os.ftruncate(self._index, size)
            raise

    def write(self, number: int, data: memoryview) -> None:
        """Write a page to a slot.

        Raises:
            OSError: the disk is full or broken.
        """
        position, start = number * self.form.slot_bytes, 0
        while start < len(data):
            start += os.pwrite(self._pages, data[start:], position + start)

    def expect(self, slots: Sequence[Slot]) -> None:
        """Have the system read the pages of slots that follow each other into its page cache, where it can be told."""
        size = self.form.slot_bytes
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._pages, slots[0].number * size, len(slots) * size, os.POSIX_FADV_WILLNEED)

    def read_pages(self, slots: Sequence[Slot], data: memoryview) -> int:
        """Read the pages of slots that follow each other, unchecked; return how many are there, from the first on."""
        return self.form.read_pages(self._pages, slots, data)

    def close(self) -> None:
        """Close the files."""
        for number in (self._pages, self._index):
            if number >= 0:
                os.close(number)
        self._pages = self._index = -1


def _claim(folder: Path, name: str, first: int) -> tuple[Path, int]:
    """Open and lock the first file of pages that no other engine has; return its path and descriptor."""
    for number in sorted(range(max(MOST_ENGINES, first + 1)), key=lambda number: number != first):
        path = folder / f"kv-{name}-{number}.pages"
        pages = _open(path)
        try:
            fcntl.flock(pages, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(pages)
            continue
        except OSError:
            os.close(pages)
            raise
        return path, pages
    raise OSError(errno.EAGAIN, f"{MOST_ENGINES} engines store pages of this model there already")


def _open(path: Path) -> int:
    """Open or make a file to read and to append. Raise OSError if it is not this user's alone."""
    return open_own(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if path.suffix != ".pages" else 0))


def _write_all(number: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(number, rest) :]
