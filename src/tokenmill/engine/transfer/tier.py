"""`Tier`: a source that stores pages in slots, of a file (`--kv-disk`) or of the host's memory (`--kv-host-size`).

The engine's thread looks up keys in memory; one thread of its own reads and writes pages, loads before saves, page by
page. The pages used least recently make room, those at the end of a prefix before those at its beginning. A page is
written as soon as it is offered and not when it is evicted: a killed process evicts nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.orders import PageLoad, PageSave
from tokenmill.engine.transfer.page_keys import page_keys
from tokenmill.engine.transfer.protocol import Answer, KeptPages
from tokenmill.engine.transfer.slots import Slot, SlotStore

logger = logging.getLogger(__name__)

# The index is begun anew when it has so many records for each slot, and so many at all.
RECORDS_PER_SLOT, LEAST_RECORDS = 4, 4096
# How long the end waits for a page that is being read or written.
CLOSE_SECONDS = 5.0


class Tier:
    """A source that stores pages in slots. Its thread starts with the first order."""

    stores = True

    def __init__(self, name: str, store: SlotStore, page_size: int) -> None:
        self.name = name
        self._store = store
        self._page_size = page_size
        self._buffer = memoryview(bytearray(store.page_bytes))
        # By key, least recently used first.
        self._slots: OrderedDict[bytes, Slot] = OrderedDict((slot.key, slot) for slot in store.slots())
        used = {slot.number for slot in self._slots.values()}
        self._free = [number for number in reversed(range(self._store.num_slots)) if number not in used]
        self._num_records = 0
        self._is_closing = self._is_broken = False
        self._rewrite()
        self._lock = threading.Lock()  # of the slots, and of what is next
        self._work = threading.Condition(self._lock)
        self._loads: deque[PageLoad] = deque()
        self._saves: deque[PageSave] = deque()
        self._thread: threading.Thread | None = None
        self._current: PageLoad | PageSave | None = None

    @property
    def num_pages(self) -> int:
        """Number of stored pages."""
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        """Number of pages that fit."""
        return self._store.num_slots

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """Do nothing: a tier has no use for a client's parameters."""

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer:
        """Return the length of the longest stored prefix; none while the disk hangs."""
        order = self._current
        if order is not None and order.is_over:
            return Answer()  # the disk hangs: the engine has given up what its thread is still busy with
        with self._lock:
            return Answer(len(self._find(query.cache_key, query.tokens)) * self._page_size)

    def _find(self, key: CacheKey, tokens: TokenArray) -> list[Slot]:
        """Return the slots of the longest prefix that is there."""
        found: list[Slot] = []
        for page_key, page_tokens in page_keys(key, tokens, self._page_size):
            slot = self._slots.get(page_key)
            if slot is None or slot.tokens != page_tokens:
                break
            found.append(slot)
        return found

    def load(self, load: PageLoad) -> None:
        """Queue a load for the tier's thread."""
        self._begin(self._loads, load)

    def save(self, save: PageSave) -> None:
        """Queue a save for the tier's thread."""
        self._begin(self._saves, save)

    def _begin(self, queue: deque[Any], order: PageLoad | PageSave) -> None:
        with self._work:
            queue.append(order)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kv-{self.name}", daemon=True)
                self._thread.start()
            self._work.notify()

    def ended(self, kept: KeptPages) -> None:
        """Return None: a tier keeps no pages of requests."""

    def forget(self, request_id: str) -> None:
        """Do nothing: a tier knows no requests."""

    def poll(self) -> Iterable[int]:
        """Return no ids: a tier keeps no pages of requests."""
        return ()

    def expired(self, kept_id: int) -> None:
        """Do nothing: a tier keeps no pages of requests."""

    def reset(self) -> None:
        """Forget all stored pages."""
        with self._lock:
            self._free.extend(slot.number for slot in self._slots.values())
            self._slots.clear()
            self._rewrite()

    def close(self) -> None:
        """Write what is on its way, end the thread, close the store. The index is left in the order of use."""
        with self._work:
            self._is_closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.error("KV tier %s abandoned: it hangs", self.name)
                return
        self._rewrite()
        self._store.close()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._loads or self._saves or self._is_closing)
                if self._is_closing and not self._saves:
                    return
                load = self._loads.popleft() if self._loads else None
                save = self._saves.popleft() if load is None else None
            if load is not None:
                self._read(load)
            elif save is not None:
                self._write(save)

    def _read(self, load: PageLoad) -> None:
        before, self._current = self._current, load
        try:
            with self._lock:
                found = self._find(load.cache_key, load.tokens)
                self._touch(found)
            for number, slot in enumerate(found[load.order.first_page :]):
                if not self._store.read(slot, self._buffer):
                    logger.warning("KV tier %s: a page is damaged and is computed again", self.name)
                    self._drop(slot)
                    break
                if not load.fill(number, self._buffer):
                    break
        except OSError as error:
            self._give_up(error)
        finally:
            self._current = before
            load.finish()

    def _touch(self, prefix: list[Slot]) -> None:
        """Mark the pages of a prefix as used: the last pages first, so that the first ones are dropped last."""
        for slot in reversed(prefix):
            self._slots.move_to_end(slot.key)

    def _drop(self, slot: Slot) -> None:
        with self._lock:
            if self._slots.get(slot.key) is slot:
                del self._slots[slot.key]
                self._free.append(slot.number)

    def _write(self, save: PageSave) -> None:
        is_saved, self._current = False, save
        try:
            is_saved = not self._is_broken and self._write_pages(save)
        except OSError as error:
            self._give_up(error)
        finally:
            self._current = None
            save.finish(is_saved)

    def _write_pages(self, save: PageSave) -> bool:
        """Write the pages that are missing; return False if the engine has taken the pages back."""
        wanted = list(page_keys(save.cache_key, save.tokens, self._page_size))
        own = {key for key, _ in wanted}
        for position in range(save.order.first_page, len(wanted)):
            self._read_waiting()
            key, tokens = wanted[position]
            with self._lock:
                if key in self._slots:
                    continue
                number = self._take_slot(own)
            if number is None:
                break  # it is larger than the tier
            slot = self._write_page(save, position - save.order.first_page, number, key, tokens)
            if slot is None:
                return False
        with self._lock:
            self._touch([self._slots[key] for key, _ in wanted if key in self._slots])
        return True

    def _read_waiting(self) -> None:
        """Do the waiting loads, which come before the next page of a save."""
        while True:
            with self._lock:
                if not self._loads:
                    return
                load = self._loads.popleft()
            self._read(load)

    def _take_slot(self, own: set[bytes]) -> int | None:
        """Return a free slot, or that of the page used least recently; None if that page is one of `own`."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots))
        return None if oldest in own else self._slots.pop(oldest).number

    def _write_page(self, save: PageSave, index: int, number: int, key: bytes, tokens: bytes) -> Slot | None:
        slot = None
        try:
            if save.read(index, self._buffer):
                self._store.write(number, self._buffer)
                slot = Slot(number, key, tokens, self._store.checksum(self._buffer))
                self._append(slot)
        finally:
            with self._lock:
                if slot is None:
                    self._free.append(number)
                else:
                    self._slots[key] = slot
        return slot

    def _append(self, slot: Slot) -> None:
        self._store.append([slot])
        self._num_records += 1
        if self._num_records > max(LEAST_RECORDS, RECORDS_PER_SLOT * self._store.num_slots):
            with self._lock:
                self._rewrite()

    def _rewrite(self) -> None:
        if self._is_broken:
            return
        try:
            self._store.rewrite(list(self._slots.values()))
            self._num_records = len(self._slots)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write nothing more, as the disk is full or broken; stored pages can still be read."""
        if not self._is_broken:
            logger.error("KV tier %s disabled: writes failed: %s", self.name, error.strerror or error)
        self._is_broken = True
