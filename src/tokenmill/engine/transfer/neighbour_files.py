"""`NeighbourFiles`: the pages that other engines of this machine have stored in files beside ours.

Each engine writes its own files and reads those of all, without locks. A writer may use a slot anew at any moment, or
die in the middle of a record: a page that is not what its record says is a miss.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slot_format import SlotFormat, open_own, read_from
from tokenmill.engine.transfer.slots import NeighbourSlot

# Seconds between two looks at the files.
_PERIOD = 0.25
# The end of an index that is none of ours: nothing comes behind it.
_NEVER = 1 << 62


class _Neighbour:
    """The slots of one other engine, as far as its index was read."""

    def __init__(self) -> None:
        self.inode = 0
        self.position = 0
        self.slots: dict[bytes, NeighbourSlot] = {}
        self._keys: dict[int, bytes] = {}

    def put(self, slot: NeighbourSlot) -> None:
        """Take in a record, which ends what was in its slot before."""
        before = self.slots.get(self._keys.pop(slot.number, b""))
        if before is not None and before.number == slot.number:
            del self.slots[before.key]
        self.slots[slot.key] = slot
        self._keys[slot.number] = slot.key

    def drop(self, slot: NeighbourSlot) -> None:
        """Forget a slot that turned out to hold something else."""
        if self.slots.get(slot.key) is slot:
            del self.slots[slot.key], self._keys[slot.number]

    def clear(self) -> None:
        """Forget all slots."""
        self.slots.clear()
        self._keys.clear()


class News(msgspec.Struct, frozen=True):
    """The slots that an index has gained since it was last read.

    Attributes:
        inode: of the index. position: where its reading ended. is_new: it was read from its beginning.
    """

    path: Path
    inode: int
    position: int
    is_new: bool
    slots: list[NeighbourSlot]


class NeighbourFiles:
    """The slots of other engines by key. `own`: the files of this one, beside which they lie."""

    def __init__(self, own: SlotFile) -> None:
        self._form: SlotFormat = own.form
        self._folder, self._own = own.folder, own.index_path
        self._neighbours: dict[Path, _Neighbour] = {}
        self._looked = float("-inf")

    def is_due(self) -> bool:
        """Return True four times a second: `read_news` should look. Touches no disk, which may hang."""
        now = time.monotonic()
        if now - self._looked < _PERIOD:
            return False
        self._looked = now
        return True

    def _changed(self) -> Iterator[Path]:
        for path in self._folder.glob(f"kv-{self._form.name}-[0-9]*.index"):
            if path == self._own:
                continue
            with contextlib.suppress(OSError):  # its engine writes it anew
                status, known = path.stat(), self._neighbours.get(path)
                end = 0 if known is None or known.inode != status.st_ino else known.position
                if status.st_size - end >= self._form.record_bytes:
                    yield path

    def read_news(self) -> list[News]:
        """Read the records that have come; `put` takes them in."""
        found = []
        for path in self._changed():
            with contextlib.suppress(OSError):
                found.append(self._read(path))
        return found

    def _read(self, path: Path) -> News:
        """Read an index from where it was left, or from its beginning if it is another file by now."""
        known, header = self._neighbours.get(path), self._form.header
        index = open_own(path, os.O_RDONLY)
        try:
            inode = os.fstat(index).st_ino
            position = 0 if known is None or known.inode != inode else known.position
            data = read_from(index, position)
        finally:
            os.close(index)
        is_new = not position
        if is_new:
            if not data.startswith(header):
                return News(path, inode, _NEVER, True, [])
            data, position = data[len(header) :], len(header)
        pages = path.with_suffix(".pages")
        slots = [NeighbourSlot(one.number, one.key, one.tokens, one.checksum, pages) for one in self._form.decode(data)]
        size = self._form.record_bytes
        return News(path, inode, position + len(data) // size * size, is_new, slots)

    def put(self, news: list[News]) -> None:
        """Take in what was read."""
        for one in news:
            neighbour = self._neighbours.setdefault(one.path, _Neighbour())
            if one.is_new:
                neighbour = self._neighbours[one.path] = _Neighbour()
            neighbour.inode, neighbour.position = one.inode, one.position
            for slot in one.slots:
                neighbour.put(slot)

    def find(self, key: bytes, tokens: bytes) -> NeighbourSlot | None:
        """Return a slot with this key and these tokens."""
        for neighbour in self._neighbours.values():
            slot = neighbour.slots.get(key)
            if slot is not None and slot.tokens == tokens:
                return slot
        return None

    def __contains__(self, key: bytes) -> bool:
        return any(key in neighbour.slots for neighbour in self._neighbours.values())

    def drop(self, slot: NeighbourSlot) -> None:
        """Forget a slot that turned out to hold something else."""
        self._neighbours[slot.pages.with_suffix(".index")].drop(slot)

    def clear(self) -> None:
        """Forget the slots that are known; later ones are found."""
        for neighbour in self._neighbours.values():
            neighbour.clear()
