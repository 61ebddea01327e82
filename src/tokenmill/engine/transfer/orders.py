"""`PageLoad` and `PageSave`: one order each, between the engine's thread and the threads of a source.

An order that is over touches no page any more, whatever its source does: a cancelled order answers `fill` and `read`
with False, and so does a finished one. So pages can be taken back from a source at any moment, at the cost of the copy
of those that are filled together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.core.transfers import LoadOrder, SaveOrder
from tokenmill.engine.transfer.checksum import find_checksum


class PageMover(Protocol):
    """Copies whole pages between the KV memory and bytes, in the memory's own layout; recurrent states likewise.

    Any thread may call it, for pages that a load or a save holds: no step touches those.

    Attributes:
        page_bytes: bytes of a page over all layers.
        layout: name of their layout; pages of another layout mean nothing here.
    """

    page_bytes: int
    layout: str

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page to `data`, of `page_bytes` bytes."""

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page with bytes from `read`."""

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        """Fill pages as long as their bytes, one page behind another, have these checksums; return how many have.

        The pages behind them may be filled with bytes that are wrong: nobody may read them.
        """


def write_one_by_one(mover: PageMover, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
    """Do a mover's `write_good` by its `write`: each page is checked before it is written."""
    _, checksum = find_checksum()
    for number, (page, wanted) in enumerate(zip(pages, checksums, strict=True)):
        content = data[number * mover.page_bytes : (number + 1) * mover.page_bytes]
        if checksum(content) != wanted:
            return number
        mover.write(page, content)
    return len(pages)


class Movers(msgspec.Struct, frozen=True):
    """The movers of an engine.

    Attributes:
        pages: of its pages, without those of the window group.
        states: of its recurrent states, slot by slot; None: the model has none.
        windows: of the pages of the window group; None: there is no such group.
    """

    pages: PageMover
    states: PageMover | None = None
    windows: PageMover | None = None


class _Order:
    """Base of both orders. It calls `told` once, when the source says that the order is over."""

    def __init__(self, cache_key: CacheKey, tokens: TokenArray, movers: Movers, told: Callable[[], None]) -> None:
        self.cache_key = cache_key
        self.tokens = tokens
        self._mover = movers.pages
        self._states = movers.states
        self._windows = movers.windows
        self._told = told
        self._lock = threading.Lock()
        self._is_over = False

    def cancel(self) -> bool:
        """Touch no page any more; return True if the order was over already."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            return was_over

    @property
    def is_over(self) -> bool:
        """True if no page is touched any more."""
        return self._is_over


class PageLoad(_Order):
    """An order to fill pages. Any thread may call it.

    Attributes:
        order: the pages, and where the source has found them.
        cache_key, tokens: whose KV the pages will hold: all tokens of the prompt up to the end of the last page.
        has_state: the state that the order asks for is filled.
    """

    def __init__(
        self, order: LoadOrder, cache_key: CacheKey, tokens: TokenArray, movers: Movers, told: Callable[[], None]
    ) -> None:
        super().__init__(cache_key, tokens, movers, told)
        self.order = order
        self.has_state = False
        self._is_filled = bytearray(len(order.page_ids))
        self._num_windows = 0

    def fill(self, number: int, data: memoryview) -> bool:
        """Fill the page of this number with verified bytes; return False if the load is over."""
        with self._lock:
            if self._is_over:
                return False
            self._mover.write(self.order.page_ids[number], data)
            self._is_filled[number] = 1
            return True

    def fill_some(self, first: int, count: int, write: Callable[[list[int]], int]) -> int:
        """Let `write` fill pages from number `first` on.

        `write` gets their ids and returns how many of them, in order, it has verified. Returns the same; 0 if the load
        is over.
        """
        with self._lock:
            if self._is_over:
                return 0
            num_good = write(self.order.page_ids[first : first + count])
            self._is_filled[first : first + num_good] = b"\1" * num_good
            return num_good

    def fill_good(self, first: int, data: memoryview, checksums: Sequence[int]) -> int:
        """Fill pages from number `first` on, as long as their bytes have these checksums; return how many have.

        0 if the load is over.
        """
        return self.fill_some(first, len(checksums), lambda pages: self._mover.write_good(pages, data, checksums))

    def fill_state(self, data: memoryview) -> None:
        """Fill the state that the order asks for with verified bytes, unless the load is over."""
        with self._lock:
            if not self._is_over and self._states is not None:
                self._states.write(self.order.state_slot, data)
                self.has_state = True

    def fill_good_state(self, _first: int, data: memoryview, checksums: Sequence[int]) -> int:
        """Fill the state that the order asks for, if its bytes have this checksum; return 1 if they have, else 0."""
        with self._lock:
            if self._is_over or self._states is None or self.order.state_slot < 0:
                return 0
            num_good = self._states.write_good([self.order.state_slot], data, checksums)
            self.has_state = num_good == 1
            return num_good

    def fill_windows(self, first: int, data: memoryview, checksums: Sequence[int]) -> int:
        """Do `fill_good` for the pages of the window group that the order asks for; they come in their order."""
        with self._lock:
            if self._is_over or self._windows is None or not self.order.windows:
                return 0
            pages = self.order.windows[first : first + len(checksums)]
            num_good = self._windows.write_good(pages, data, checksums)
            self._num_windows = first + num_good
            return num_good

    def finish(self) -> None:
        """End the load: no more pages come. A second call changes nothing."""
        if not self.cancel():
            self._told()

    @property
    def num_filled(self) -> int:
        """Number of filled pages before the first that is missing.

        Pages of a window group belong to the last ones: where one of either is missing, no request could begin there.
        """
        missing = self._is_filled.find(0)
        if self.order.windows and (missing >= 0 or self._num_windows < len(self.order.windows)):
            return 0
        return len(self._is_filled) if missing < 0 else missing


class PageSave(_Order):
    """An order that offers pages. Any thread may call it.

    Attributes:
        order: the pages.
        cache_key, tokens: whose KV the pages hold: all tokens of the prefix.
        is_saved: what the source has reported at the end.
    """

    def __init__(
        self, order: SaveOrder, cache_key: CacheKey, tokens: TokenArray, movers: Movers, told: Callable[[], None]
    ) -> None:
        super().__init__(cache_key, tokens, movers, told)
        self.order = order
        self.is_saved = False

    def read(self, number: int, data: memoryview) -> bool:
        """Copy the page of this number to `data`; return False if the save is over."""
        with self._lock:
            if self._is_over:
                return False
            self._mover.read(self.order.page_ids[number], data)
            return True

    def read_state(self, slot: int, data: memoryview) -> bool:
        """Copy a state of the order to `data`; return False if the save is over."""
        return self._read_from(self._states, slot, data)

    def read_window(self, page: int, data: memoryview) -> bool:
        """Copy a page of the window group to `data`; return False if the save is over."""
        return self._read_from(self._windows, page, data)

    def _read_from(self, mover: PageMover | None, place: int, data: memoryview) -> bool:
        with self._lock:
            if self._is_over or mover is None:
                return False
            mover.read(place, data)
            return True

    def finish(self, is_saved: bool = True) -> None:
        """End the save: no more pages are read. A second call changes nothing."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            if not was_over:
                self.is_saved = is_saved
        if not was_over:
            self._told()
