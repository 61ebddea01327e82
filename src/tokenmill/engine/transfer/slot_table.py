"""`SlotTable`: find what a store has in its slots by key; the least recently used makes room.

`SharedTable`: find what other engines of the machine have stored beside it, too.

`PrefixTables`: find how much of a prefix is there, with all that a request needs to begin behind it.

They know neither threads nor orders: their owner holds a lock where several threads call them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import msgspec

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.engine.kv.window_pages import pages_of_window
from tokenmill.engine.transfer.neighbour_files import NeighbourFiles
from tokenmill.engine.transfer.page_keys import page_keys
from tokenmill.engine.transfer.slot_file import SlotFile
from tokenmill.engine.transfer.slot_format import read_elsewhere
from tokenmill.engine.transfer.slots import NeighbourSlot, Slot, SlotStore

logger = logging.getLogger(__name__)

# The index is begun anew when it has so many records for each slot, and so many at all.
RECORDS_PER_SLOT, LEAST_RECORDS = 4, 4096
# Bytes of pages that follow each other are read together: a core's caches hold them until they are copied.
RUN_BYTES = 1 << 20


class SlotTable:
    """The slots of one store by key, with a buffer for the content of one.

    Attributes:
        name: of the tier, for the log.
        buffer: `page_bytes` of the store. most_pages: how many are read at a time.
    """

    def __init__(self, name: str, store: SlotStore) -> None:
        self.name = name
        self.store = store
        self.most_pages = max(1, RUN_BYTES // store.page_bytes)
        self._run = memoryview(bytearray(self.most_pages * store.page_bytes))
        self.buffer = self._run[: store.page_bytes]
        # By key, least recently used first.
        self._slots: OrderedDict[bytes, Slot] = OrderedDict((slot.key, slot) for slot in store.slots())
        used = {slot.number for slot in self._slots.values()}
        # Not a list of all: a disk has millions of small pages.
        self._num_used = 1 + max(used, default=-1)
        self._free = [number for number in reversed(range(self._num_used)) if number not in used]
        self._num_records = 0
        self._is_broken = False
        self.rewrite()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def is_broken(self) -> bool:
        """True once a write has failed: stored content can still be read."""
        return self._is_broken

    def find(self, key: bytes, tokens: bytes) -> Slot | None:
        """Return the slot of this key, if it is that of these tokens."""
        slot = self._slots.get(key)
        return slot if slot is not None and slot.tokens == tokens else None

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark content as used, in this order; what is not there is passed over."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)

    def take(self, own: Container[bytes] = ()) -> int | None:
        """Return a free slot, or that of the content used least recently; None if that is one of `own`."""
        if self._free:
            return self._free.pop()
        if self._num_used < self.store.num_slots:
            self._num_used += 1
            return self._num_used - 1
        oldest = next(iter(self._slots))
        return None if oldest in own else self._slots.pop(oldest).number

    def put(self, slot: Slot) -> None:
        """Enter the new content of a slot that was taken."""
        self._slots[slot.key] = slot

    def give_back(self, number: int) -> None:
        """Give back a slot that was taken and not filled."""
        self._free.append(number)

    def drop(self, slot: Slot) -> None:
        """Forget damaged content, unless its key has another slot by now."""
        logger.warning("KV tier %s: a page is damaged and is computed again", self.name)
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            self._free.append(slot.number)

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(slot.number for slot in self._slots.values())
        self._slots.clear()
        self.rewrite()

    def write(self, number: int, key: bytes, tokens: bytes) -> Slot:
        """Write the buffer to a slot that was taken, and return its record, to be put.

        Raises:
            OSError: the disk is full or broken.
        """
        self.store.write(number, self.buffer)
        slot = Slot(number, key, tokens, self.store.checksum(self.buffer))
        self.store.append([slot])
        self._num_records += 1
        return slot

    @property
    def is_index_long(self) -> bool:
        """True if the index has so many old records that it should be rewritten."""
        return self._num_records > max(LEAST_RECORDS, RECORDS_PER_SLOT * self.store.num_slots)

    def read(self, slot: Slot) -> bool:
        """Read a slot into the buffer; return False if it is damaged. Raises OSError."""
        data = self.read_run([slot])
        return bool(data) and self.store.checksum(data) == slot.checksum

    def runs(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        """Divide slots into those that can be read together, in their order."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or end - start == self.most_pages or not slots[end].follows(slots[end - 1]):
                yield slots[start:end]
                start = end

    def expect(self, run: Sequence[Slot]) -> None:
        """Begin to fetch a run that is read soon."""
        self.store.expect(run)

    def read_run(self, run: Sequence[Slot]) -> memoryview:
        """Return the pages of a run, one behind another, until the next call: as many as are there, unchecked.

        Raises:
            OSError: the disk is broken.
        """
        size = self.store.page_bytes
        return self._run[: self._read_pages(run, self._run[: len(run) * size]) * size]

    def _read_pages(self, run: Sequence[Slot], data: memoryview) -> int:
        return self.store.read_pages(run, data)

    def is_due(self) -> bool:
        """Return True if it is time to look, by `read_news`, for what other engines have stored; touches no disk."""
        return False

    def read_news(self) -> Callable[[], None]:
        """Read what other engines have stored, and return what takes it in."""
        return lambda: None

    def rewrite(self) -> None:
        """Begin the index anew, in the order of use."""
        if self._is_broken:
            return
        try:
            self.store.rewrite(list(self._slots.values()))
            self._num_records = len(self._slots)
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Write nothing more, as the disk is full or broken; stored content can still be read."""
        if not self._is_broken:
            logger.error("KV tier %s disabled: writes failed: %s", self.name, error.strerror or error)
        self._is_broken = True


class SharedTable(SlotTable):
    """A table that has what other engines of this machine have stored too: what one has, none stores again.

    Their content is read only. It makes no room here, and may go at any moment, which counts as damage that is no news.
    """

    def __init__(self, name: str, store: SlotFile) -> None:
        super().__init__(name, store)
        self._form, self._others = store.form, NeighbourFiles(store)

    def __contains__(self, key: bytes) -> bool:
        return super().__contains__(key) or key in self._others

    def find(self, key: bytes, tokens: bytes) -> Slot | None:
        """Return the slot of this key, if it is that of these tokens; this engine's first."""
        return super().find(key, tokens) or self._others.find(key, tokens)

    def drop(self, slot: Slot) -> None:
        """Forget content that is damaged, or gone."""
        if isinstance(slot, NeighbourSlot):
            self._others.drop(slot)
        else:
            super().drop(slot)

    def clear(self) -> None:
        """Forget everything that is there now."""
        super().clear()
        self._others.clear()

    def expect(self, run: Sequence[Slot]) -> None:
        """Begin to fetch a run of this engine's own file."""
        if not isinstance(run[0], NeighbourSlot):
            super().expect(run)

    def _read_pages(self, run: Sequence[Slot], data: memoryview) -> int:
        if isinstance(run[0], NeighbourSlot):
            return read_elsewhere(self._form, cast("Sequence[NeighbourSlot]", run), data)
        return super()._read_pages(run, data)

    def is_due(self) -> bool:
        """Return True if it is time to look, by `read_news`, for what other engines have stored; touches no disk."""
        return self._others.is_due()

    def read_news(self) -> Callable[[], None]:
        """Read what other engines have stored, and return what takes it in."""
        return partial(self._others.put, self._others.read_news())


class PrefixTables(msgspec.Struct, frozen=True):
    """The tables of a tier: of pages, and of what belongs to them, by the same keys.

    Attributes:
        states: of recurrent states, by the page that one stands behind; None: the model has none.
        windows: of pages of the window group, by their full pages; None: there is no such group.
        window: most tokens that the group serves.
    """

    pages: SlotTable
    page_size: int
    states: SlotTable | None = None
    windows: SlotTable | None = None
    window: int = 0

    @property
    def all(self) -> list[SlotTable]:
        """All tables that there are."""
        return [self.pages, *(table for table in (self.states, self.windows) if table is not None)]

    def find(self, key: CacheKey, tokens: TokenArray) -> list[Slot]:
        """Return the slots of the longest prefix that is there, and behind which a request can begin."""
        found: list[Slot] = []
        num_usable = num_in_row = 0
        for page_key, page_tokens in page_keys(key, tokens, self.page_size):
            slot = self.pages.find(page_key, page_tokens)
            if slot is None:
                break
            found.append(slot)
            if self.windows is not None:
                num_in_row = num_in_row + 1 if self.windows.find(page_key, page_tokens) is not None else 0
                if num_in_row < pages_of_window(len(found), self.window, self.page_size):
                    continue
            if self.states is None or self.states.find(page_key, page_tokens) is not None:
                num_usable = len(found)
        return found[:num_usable]

    def touch(self, prefix: list[bytes]) -> None:
        """Mark a prefix as used: the last pages first, so that the first ones are dropped last."""
        for table in self.all:
            table.touch(reversed(prefix))
