"""`Tier`: a source that stores pages in slots, of a file (`--kv-disk`) or of the host's memory (`--kv-host-size`).

The engine's thread looks up keys in memory; one thread of its own reads and writes pages, loads before saves: it reads
those together that lie together, and writes page by page. The pages used least recently make room, those at the end of
a prefix before those at its beginning. A page is written as soon as it is offered and not when it is evicted: a killed
process evicts nothing.

A recurrent state is kept by the key of the page that it stands behind, in slots of its own. A model that has states can
begin only behind one, so of a prefix as much is found as lies before the last of them. A page of a window group is kept
by the key of its full page, in slots of its own too; a prefix is found up to where its last window is whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.orders import PageLoad, PageSave
from tokenmill.engine.transfer.page_keys import page_keys
from tokenmill.engine.transfer.protocol import Answer, KeptPages
from tokenmill.engine.transfer.slot_table import PrefixTables, SlotTable
from tokenmill.engine.transfer.slots import Slot

logger = logging.getLogger(__name__)

# How long the end waits for a page that is being read or written.
CLOSE_SECONDS = 5.0
# How long a lookup waits for what other engines have stored, on a disk that may be busy; then what is known must do.
CATCH_UP_SECONDS = 2.0
# Runs of pages that a disk fetches while those before are copied.
RUNS_AHEAD = 8


class Tier:
    """A source that stores pages in slots. Its thread starts with the first order.

    Args:
        tables: where pages are stored, and what belongs to them. The tier's thread uses them too.
    """

    stores = True

    def __init__(self, tables: PrefixTables) -> None:
        self.name = tables.pages.name
        self.tables = tables
        self._page_size = tables.page_size
        self._pages, self._states, self._windows = tables.pages, tables.states, tables.windows
        self._is_closing = False
        self._behind_since: float | None = None  # other engines have stored what is being read
        self._lock = threading.Lock()  # of the tables, and of what is next
        self._work = threading.Condition(self._lock)
        self._loads: deque[PageLoad] = deque()
        self._saves: deque[PageSave] = deque()
        self._thread: threading.Thread | None = None
        self._current: PageLoad | PageSave | None = None

    @property
    def num_pages(self) -> int:
        """Number of stored pages."""
        return len(self._pages)

    @property
    def num_slots(self) -> int:
        """Number of pages that fit."""
        return self._pages.store.num_slots

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """Do nothing: a tier has no use for a client's parameters."""

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer | None:
        """Return the length of the longest stored prefix; none while the disk hangs.

        None: what other engines have stored meanwhile is being read.
        """
        order = self._current
        if order is not None and order.is_over:
            return Answer()  # the disk hangs: the engine has given up what its thread is still busy with
        if self._is_catching_up():
            return None
        with self._lock:
            return Answer(len(self.tables.find(query.cache_key, query.tokens)) * self._page_size)

    def _is_catching_up(self) -> bool:
        """Return True while the tier's thread reads what other engines have stored, if that does not take long."""
        if self._behind_since is None and any(table.is_due() for table in self.tables.all):
            with self._work:
                self._behind_since = time.monotonic()
                self._wake()
        return self._behind_since is not None and time.monotonic() - self._behind_since < CATCH_UP_SECONDS

    def load(self, load: PageLoad) -> None:
        """Queue a load for the tier's thread."""
        self._begin(self._loads, load)

    def save(self, save: PageSave) -> None:
        """Queue a save for the tier's thread."""
        self._begin(self._saves, save)

    def _begin(self, queue: deque[Any], order: PageLoad | PageSave) -> None:
        with self._work:
            queue.append(order)
            self._wake()

    def _wake(self) -> None:
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
        """Forget all stored pages and states."""
        with self._lock:
            for table in self.tables.all:
                table.clear()

    def close(self) -> None:
        """Write what is on its way, end the thread, close the stores. The indexes are left in the order of use."""
        with self._work:
            self._is_closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.error("KV tier %s abandoned: it hangs", self.name)
                return
        for table in self.tables.all:
            table.rewrite()
            table.store.close()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._loads or self._saves or self._is_closing or self._behind_since)
                if self._is_closing and not self._saves:
                    return
                is_behind = self._behind_since is not None
                load = self._loads.popleft() if self._loads else None
                save = self._saves.popleft() if self._saves and load is None else None
            if is_behind:
                self._catch_up()
            if load is not None:
                self._read(load)
            elif save is not None:
                self._write(save)

    def _catch_up(self) -> None:
        """Take in what other engines have stored."""
        news = [table.read_news() for table in self.tables.all]
        with self._lock:
            for take_in in news:
                take_in()
            self._behind_since = None

    def _read(self, load: PageLoad) -> None:
        before, self._current = self._current, load
        try:
            with self._lock:
                found = self.tables.find(load.cache_key, load.tokens)
                self.tables.touch([slot.key for slot in found])
            wanted = found[load.order.first_page :]
            if self._read_pages(load, self._pages, wanted, load.fill_good) and len(wanted) == len(load.order.page_ids):
                self._read_besides(load, wanted)
        finally:
            self._current = before
            load.finish()

    def _read_pages(
        self, load: PageLoad, table: SlotTable, slots: list[Slot], fill: Callable[[int, memoryview, list[int]], int]
    ) -> bool:
        """Fill pages of a load from these slots of a table; return True if all of them are whole."""
        number, size, runs = 0, table.store.page_bytes, list(table.runs(slots))
        for index, run in enumerate(runs):
            try:
                for later in runs[index + RUNS_AHEAD if index else 1 : index + RUNS_AHEAD + 1]:
                    table.expect(later)
                data = table.read_run(run)
            except OSError as error:
                table.give_up(error)
                return False
            checksums = [slot.checksum for slot in run[: len(data) // size]]
            good = fill(number, data, checksums) if data else 0
            if good < len(run):
                if not load.is_over:
                    self._drop(table, run[good])
                return False
            number += good
        return True

    def _read_besides(self, load: PageLoad, pages: list[Slot]) -> None:
        """Fill what belongs to the pages of a load besides them: a state behind the last, pages of the window group."""
        if self._states is not None:
            self._read_state(load, self._states, pages[-1])
        if self._windows is not None and load.order.windows:
            with self._lock:
                slots = [self._windows.find(page.key, page.tokens) for page in pages[-len(load.order.windows) :]]
            whole = [slot for slot in slots if slot is not None]
            if len(whole) == len(slots):
                self._read_pages(load, self._windows, whole, load.fill_windows)

    def _read_state(self, load: PageLoad, states: SlotTable, behind: Slot) -> None:
        """Fill the state of a load, which stands behind its last page."""
        with self._lock:
            slot = states.find(behind.key, behind.tokens)
        if slot is not None and self._read_slot(states, slot):
            load.fill_state(states.buffer)

    def _read_slot(self, table: SlotTable, slot: Slot) -> bool:
        """Read a slot into its table's buffer; return False, and forget it, if it is damaged."""
        try:
            is_whole = table.read(slot)
        except OSError as error:
            table.give_up(error)
            return False
        if not is_whole:
            self._drop(table, slot)
        return is_whole

    def _drop(self, table: SlotTable, slot: Slot) -> None:
        with self._lock:
            table.drop(slot)

    def _write(self, save: PageSave) -> None:
        is_saved, self._current = False, save
        try:
            is_saved = not self._pages.is_broken and self._write_pages(save)
            if is_saved and self._states is not None:
                is_saved = self._write_besides(save, self._states, save.order.states, save.read_state)
            if is_saved and self._windows is not None:
                windows = [(number + 1, page) for number, page in save.order.windows or ()]
                is_saved = self._write_besides(save, self._windows, windows, save.read_window)
        except OSError as error:
            self._pages.give_up(error)
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
                if key in self._pages:
                    continue
                number = self._pages.take(own)
            if number is None:
                break  # it is larger than the tier
            index = position - save.order.first_page
            if not self._write_slot(self._pages, number, key, tokens, partial(save.read, index)):
                return False
        with self._lock:
            self.tables.touch([key for key, _ in wanted])
        return True

    def _write_besides(
        self,
        save: PageSave,
        table: SlotTable,
        places: Sequence[tuple[int, int]],
        read: Callable[[int, memoryview], bool],
    ) -> bool:
        """Write the states, or pages of the window group, that are missing.

        Args:
            places: for each the number of pages of the prefix up to it, and where `read` finds it.

        Returns:
            False if the engine has taken them back, or the disk fails.
        """
        wanted = list(page_keys(save.cache_key, save.tokens, self._page_size)) if places else []
        for num_pages, place in places:
            self._read_waiting()
            key, tokens = wanted[num_pages - 1]
            with self._lock:
                if table.is_broken or key in table:
                    continue
                number = table.take()
            assert number is not None, "a store has a slot"
            try:
                if not self._write_slot(table, number, key, tokens, partial(read, place)):
                    return False
            except OSError as error:
                table.give_up(error)
        return not table.is_broken

    def _read_waiting(self) -> None:
        """Do the waiting loads, which come before the next page of a save."""
        while True:
            with self._lock:
                if not self._loads:
                    return
                load = self._loads.popleft()
            self._read(load)

    def _write_slot(
        self, table: SlotTable, number: int, key: bytes, tokens: bytes, read: Callable[[memoryview], bool]
    ) -> bool:
        """Write what `read` copies to a slot that was taken; return False if it copies nothing any more."""
        slot = None
        try:
            if read(table.buffer):
                slot = table.write(number, key, tokens)
        finally:
            with self._lock:
                if slot is None:
                    table.give_back(number)
                else:
                    table.put(slot)
        if table.is_index_long:
            with self._lock:
                table.rewrite()
        return slot is not None
